"""The command `teacher`, also as `python -m teacher`."""

import sys


def main() -> int:
    """Run the command line, or say which package is missing."""
    try:
        from teacher.cli import main as run
    except ModuleNotFoundError as error:
        print(
            f"teacher: expected the package {error.name}, got none; an auditor's install has `receipts` alone, the rest"
            " comes with source-teacher[teacher]",
            file=sys.stderr,
        )
        return 2
    return run()


if __name__ == "__main__":
    sys.exit(main())
