"""What verifying a finished run found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SHOWN = 5  # faults told in full


@dataclass(frozen=True)
class Verification:
    """Items built and answers scored again, without the model's weights.

    Attributes:
        head: of the run's seal. ``items``, ``cells``: built and scored again.
        faults: what is not as the plan makes it; none means that the run passed. ``more``: how many are not listed.
        notes: what a reader should know besides.
    """

    head: str
    items: int
    cells: int
    faults: tuple[str, ...]
    more: int = 0
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults

    @staticmethod
    def of(head: str, items: int, cells: int, faults: Sequence[str], notes: Sequence[str]) -> Verification:
        """With as many faults as are shown."""
        return Verification(
            head, items, cells, tuple(faults[:SHOWN]), max(0, len(faults) - SHOWN), tuple(dict.fromkeys(notes))
        )
