"""How a sequence is cut into calls when a plan does not say it itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from receipts.errors import PlanError

_FORMS = "expected mixed, mixed:N, prefill, chunks:N, decode or decode:P"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallShape:
    """A rule that cuts any length into calls.

    Attributes:
        kind: "prefill" (one call), "chunks" (calls of `size`, the last one shorter), "decode" (a call of `size`, then
            token by token) or "mixed" (one call, then the last `size` tokens one by one, at most a third of them).
        size: what `kind` says of it; 0 for "prefill".
    """

    kind: str
    size: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read "prefill", "chunks:64", "decode", "decode:8", "mixed" or "mixed:24".

        Raises:
            PlanError: any other text.
        """
        kind, colon, number = text.partition(":")
        defaults = {"prefill": 0, "chunks": None, "decode": 1, "mixed": 24}
        size = defaults.get(kind)
        if colon and kind != "prefill" and number.isascii() and number.isdigit() and len(number) < 6:
            size = int(number)
        elif colon:
            size = None
        if kind not in defaults or size is None or (size < 1 and kind != "prefill"):
            raise PlanError(f"call shape {text!r}: {_FORMS}, N and P at least 1")
        return cls(kind=kind, size=size)

    def cut(self, length: int) -> tuple[int, ...]:
        """Return call lengths that sum to `length`, each at least 1."""
        match self.kind:
            case "chunks":
                whole, rest = divmod(length, self.size)
                return (self.size,) * whole + ((rest,) if rest else ())
            case "decode":
                head = min(self.size, length)
            case "mixed":
                head = length - min(self.size, length // 3)
            case _:
                head = length
        return (head,) + (1,) * (length - head)

    def __str__(self) -> str:
        return f"{self.kind}:{self.size}" if self.size else self.kind
