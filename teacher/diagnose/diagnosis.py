"""Why a candidate differs: who of three is off, the four cells, the layers, and what is carried between calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from receipts.comparison import Comparison
from receipts.diagnosis import Arbitration, Cells, Diagnosis, Localisation
from receipts.errors import EngineMissingError, NonFiniteError
from teacher.diagnose.arbitrate import arbitrate, disagrees
from teacher.diagnose.bands import carried_state, file_engine_band
from teacher.diagnose.cells import measure_cells
from teacher.diagnose.locate import choose_examples, locate
from teacher.diagnose.state import examine_state
from teacher.sides.roster import OnProgress, Roster, Sides
from teacher.snapshot.config import ModelConfig

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a verification has and has measured.

    Attributes:
        config: of the snapshot.
        sides, roster: where and what runs.
        unquantized: a GGUF of the source's own values, if one was given.
        floor, total: teacher against PyTorch, and against the candidate.
        floor_limit: mean KLD in nats up to which teacher and PyTorch agree, by the policy.
        threads: of each engine.
    """

    config: ModelConfig
    sides: Sides
    roster: Roster
    unquantized: Path | None
    floor: Comparison
    total: Comparison
    floor_limit: float
    threads: int
    on_progress: OnProgress


class Diagnoser:
    """Runs the parts of a diagnosis, each of which may be had without the others.

    Attributes:
        notes: which parts could not be had, and why.
    """

    def __init__(self, measured: Measured) -> None:
        self._measured = measured
        self.notes: list[str] = []

    def diagnose(self) -> Diagnosis:
        """Run all of them."""
        arbitration = self._try("the three-way check did not run", self._arbitrate)
        cells = self._try("the four cells were not measured", self._cells)
        localisation = self._try("layers were not compared", lambda: self._locate(cells))
        state = self._try("state between calls was not examined", lambda: self._state(cells, localisation))
        return Diagnosis(cells=cells, localisation=localisation, state=state or (), arbitration=arbitration)

    def _try(self, subject: str, part: Callable[[], T]) -> T | None:
        try:
            return part()
        except (NonFiniteError, EngineMissingError) as error:
            self.notes.append(f"{subject}: {error}")
            return None

    def _arbitrate(self) -> Arbitration | None:
        m = self._measured
        if not disagrees(m.floor, m.floor_limit):
            return None
        return arbitrate(m.sides, m.roster, m.floor, m.floor_limit)

    def _cells(self) -> Cells:
        m = self._measured
        plain = m.unquantized
        return measure_cells(
            m.sides,
            m.roster.teacher(),
            m.roster.teacher("gguf weights", gguf=m.roster.gguf),
            m.roster.engine(),
            None if plain is None else m.roster.engine("unquantized", gguf=plain),
            floor=m.floor,
            total=m.total,
        )

    def _locate(self, cells: Cells | None) -> Localisation:
        m, roster = self._measured, self._measured.roster
        traced = choose_examples(roster.plan, m.total if cells is None else cells.engine)
        return locate(roster, traced, config=m.config, threads=m.threads, on_progress=m.on_progress)

    def _state(self, cells: Cells | None, localisation: Localisation | None) -> tuple[str, ...]:
        m, roster = self._measured, self._measured.roster
        # Against the file's own weights where they can be run, so that what they lose does not hide it.
        gguf = None if cells is None else roster.gguf
        found = examine_state(
            m.sides,
            lambda name, plan: roster.teacher(name, plan=plan, gguf=gguf),
            lambda name, plan: roster.engine(name, plan=plan),
            roster.plan,
            m.total if cells is None else cells.engine,
        )
        carried = None
        if localisation is not None:
            carried = carried_state(localisation.layers, file_engine_band(roster.gguf))
        return found if carried is None else (*found, carried)
