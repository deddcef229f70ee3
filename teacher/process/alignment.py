"""Two logit streams side by side, and the digest of one on its way past; neither holds more than a block.

Two engines may cut the same examples into different calls. `align` cuts both streams again at every boundary of
either, so that what compares them sees equal row ranges.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from receipts.errors import EngineFailedError
from teacher.process.sources import LogitBlock, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignedRows:
    """The same positions as two sources saw them.

    Attributes:
        example: index into the plan's examples.
        position: first token position of the rows within the example.
        expected_call, actual_call: the call each side computed them in, for its own plan.
        expected: [n, V] float32.
        actual: [n, V'] float32; V' is V where both engines have the same vocabulary rows.
    """

    example: int
    position: int
    expected_call: int
    actual_call: int
    expected: npt.NDArray[np.float32]
    actual: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDigest:
    """SHA-256 over the float32 little-endian logits of one call, row after row.

    Attributes:
        example: index into the plan's examples.
        call: index into that example's calls.
        position: first token position of the call within the example.
        rows: positions of the call.
        width: logits of one row.
        sha256: 64 lower-case hex digits.
    """

    example: int
    call: int
    position: int
    rows: int
    width: int
    sha256: str


class DigestedBlocks:
    """Passes a stream on and hashes it call by call; `digests` is complete when the stream has ended.

    The digest of a call does not depend on how the source cut it into blocks.
    """

    def __init__(self, blocks: Iterable[LogitBlock]) -> None:
        self._blocks = blocks
        self._digests: list[CallDigest] = []

    @property
    def digests(self) -> tuple[CallDigest, ...]:
        """Digests of the calls that have ended so far."""
        return tuple(self._digests)

    def __iter__(self) -> Iterator[LogitBlock]:
        open_call: tuple[int, int] | None = None
        digest, position, rows, width = hashlib.sha256(), 0, 0, 0
        for block in self._blocks:
            if open_call != (block.example, block.call):
                if open_call is not None:
                    self._close(open_call, position, rows, width, digest.hexdigest())
                open_call = (block.example, block.call)
                digest, position, rows = hashlib.sha256(), block.position, 0
            width = block.logits.shape[1]
            rows += block.logits.shape[0]
            digest.update(np.ascontiguousarray(block.logits, dtype="<f4").data)
            yield block
        if open_call is not None:
            self._close(open_call, position, rows, width, digest.hexdigest())

    def _close(self, call: tuple[int, int], position: int, rows: int, width: int, sha256: str) -> None:
        self._digests.append(
            CallDigest(example=call[0], call=call[1], position=position, rows=rows, width=width, sha256=sha256)
        )


def digest_blocks(blocks: Iterable[LogitBlock]) -> DigestedBlocks:
    """Return the stream with each call's digest taken on the way."""
    return DigestedBlocks(blocks)


def check_coverage(blocks: Iterable[LogitBlock], plan: Plan, source: str) -> Iterator[LogitBlock]:
    """Pass a stream on while holding it to its plan.

    Raises:
        EngineFailedError: a block is out of order, of another shape, or a position is missing or left over.
    """
    places = [
        (number, call, first, length)
        for number, example in enumerate(plan.examples)
        for call, first, length in _calls(example.calls)
    ]
    turn, filled, width = 0, 0, 0
    for block in blocks:
        place = (block.example, block.call, block.position)
        if turn == len(places):
            raise EngineFailedError(f"{source}: expected no more logits, got {_place(*place)}", source=source)
        example, call, first, length = places[turn]
        wanted = (example, call, first + filled)
        if place != wanted:
            raise EngineFailedError(
                f"{source}: expected logits of {_place(*wanted)}, got {_place(*place)}", source=source
            )
        shape = block.logits.shape
        width = width or (shape[1] if len(shape) == 2 else 0)
        if len(shape) != 2 or shape[1] != width or not 0 < shape[0] <= length - filled:
            raise EngineFailedError(
                f"{source}: expected up to {length - filled} rows of {width} logits, got shape {shape}"
                f" at {_place(*place)}",
                source=source,
            )
        filled += shape[0]
        if filled == length:
            turn, filled = turn + 1, 0
        yield block
    if turn < len(places):
        example, call, first, _ = places[turn]
        raise EngineFailedError(
            f"{source}: expected logits of {_place(example, call, first + filled)}, got the end of the stream",
            source=source,
        )


def align(
    expected: Iterable[LogitBlock],
    actual: Iterable[LogitBlock],
    *,
    names: tuple[str, str] = ("expected", "actual"),
) -> Iterator[AlignedRows]:
    """Yield equal row ranges of two streams over the same examples.

    Raises:
        EngineFailedError: one side lacks positions the other has; names the side, the example and the position.
    """
    sides = (_Rest(expected, names[0]), _Rest(actual, names[1]))
    while True:
        blocks = [side.block() for side in sides]
        left, right = blocks
        if left is None and right is None:
            return
        places = [None if block is None else (block.example, block.position) for block in blocks]
        if left is None or right is None or places[0] != places[1]:
            known = [place for place in places if place is not None]
            behind = places.index(None) if None in places else places.index(max(known))
            missing, got = min(known), places[behind]
            found = "the end of the stream" if got is None else f"example {got[0]} position {got[1]}"
            raise EngineFailedError(
                f"{names[behind]}: expected logits of example {missing[0]} position {missing[1]}, got {found}",
                side=names[behind],
                example=missing[0],
                position=missing[1],
            )
        rows = min(left.logits.shape[0], right.logits.shape[0])
        yield AlignedRows(
            example=left.example,
            position=left.position,
            expected_call=left.call,
            actual_call=right.call,
            expected=left.logits[:rows],
            actual=right.logits[:rows],
        )
        for side in sides:
            side.drop(rows)


class _Rest:
    """What is left of one side's current block."""

    def __init__(self, blocks: Iterable[LogitBlock], name: str) -> None:
        self._blocks = iter(blocks)
        self._name = name
        self._block: LogitBlock | None = None

    def block(self) -> LogitBlock | None:
        if self._block is None:
            self._block = next(self._blocks, None)
        return self._block

    def drop(self, rows: int) -> None:
        block = self._block
        assert block is not None
        if rows == block.logits.shape[0]:
            self._block = None
            return
        self._block = LogitBlock(
            example=block.example, call=block.call, position=block.position + rows, logits=block.logits[rows:]
        )


def _calls(lengths: Iterable[int]) -> Iterator[tuple[int, int, int]]:
    """Yield index, first position and length of each call of one example."""
    first = 0
    for index, length in enumerate(lengths):
        yield index, first, length
        first += length


def _place(example: int, call: int, position: int) -> str:
    return f"example {example} call {call} position {position}"
