"""What llama.cpp says while it works: kept for errors and receipts, and passed on to stderr."""

from __future__ import annotations

import collections
import ctypes
import sys

from teacher.candidates.llama_abi import Library, LogCallback

_DEBUG, _ERROR, _CONTINUED = 1, 4, 5  # ggml's levels: debug is left out, continued text is the last line's


class EngineLog:
    """Takes the library's log lines; must live as long as the library may log."""

    def __init__(self, library: Library, *, keep: int = 400) -> None:
        self._lines: collections.deque[str] = collections.deque(maxlen=keep)
        self._errors: collections.deque[str] = collections.deque(maxlen=keep)
        self._level = 0
        self._callback = LogCallback(self._take)
        library.call("llama_log_set", self._callback, None)

    def _take(self, level: int, text: bytes | None, _: ctypes.c_void_p | None) -> None:
        if level != _CONTINUED:
            self._level = level
        if self._level == _DEBUG or text is None:
            return
        said = text.decode("utf-8", errors="replace")
        sys.stderr.write(said)
        for lines in (self._lines, self._errors) if self._level == _ERROR else (self._lines,):
            if level == _CONTINUED and lines:
                lines[-1] += said.rstrip("\n")
            else:
                lines.extend(line for line in said.split("\n") if line.strip())

    def last(self, count: int = 12) -> list[str]:
        """Return the last lines."""
        return list(self._lines)[-count:]

    def saying(self, *words: str) -> list[str]:
        """Return the lines that hold any of the words."""
        return [line for line in self._lines if any(word in line for word in words)]

    def complaint(self) -> str:
        """Return the line that says most about a failure: the first the engine calls an error, else the last."""
        found = list(self._errors) or self.last(1)
        return found[0].strip() if found else "no log line"
