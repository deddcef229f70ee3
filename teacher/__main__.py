"""`python -m teacher` is the command `teacher`."""

import sys

from teacher.cli import main

sys.exit(main())
