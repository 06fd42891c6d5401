"""H2O: heavy hitters by accumulated attention, and a recent window.

Source: Zhang et al. 2023 (NeurIPS), "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language
Models", section 4 and algorithm 1; half of the budget for each part as in section 5 ("equal budget").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from kvgate.compressors.evidence import Evidence, Keep, Need, in_spans
from kvgate.compressors.policy import Policy
from kvgate.compressors.ranking import keep_highest, score_keys


@dataclass(frozen=True)
class H2O(Policy):
    """Keeps the last ``recent`` tokens and, of the others, the ``heavy`` ones with the most attention mass.

    Mass is summed, not averaged, over all queries so far and over the query heads of a kv head, in fp32. Protected
    tokens outside the recent window take the places of heavy hitters.
    """

    name: ClassVar[str] = "h2o"
    needs: ClassVar[frozenset[Need]] = frozenset({"mass"})
    heavy: int
    recent: int

    def __post_init__(self) -> None:
        if self.heavy < 0 or self.recent < 0 or self.heavy + self.recent < 1:
            raise ValueError(
                f"policy {self.name}: heavy {self.heavy}, recent {self.recent}: not negative, one of them at least 1"
            )

    @classmethod
    def for_budget(cls, budget: int, recent: int | None = None) -> Self:
        """``recent`` tokens of the budget for the window; None: half of it, rounded up."""
        recent = -(-budget // 2) if recent is None else recent
        if recent > budget:
            raise ValueError(f"policy {cls.name}: recent {recent} is larger than the budget {budget}")
        return cls(heavy=budget - recent, recent=recent)

    @property
    def budget(self) -> int:
        return self.heavy + self.recent

    def decide(self, evidence: Evidence) -> Keep:
        positions, live = evidence.positions, evidence.live
        protected = live & in_spans(positions, evidence.protected)
        recent = live & ~protected & (positions >= evidence.length - self.recent)
        room = (self.budget - protected.sum(-1)).clamp_min(0)
        recent = keep_highest(positions.long(), recent, room)
        others = live & ~protected & ~recent
        heavy = keep_highest(score_keys(self.weight(evidence), positions), others, room - recent.sum(-1))
        return Keep(protected | recent | heavy)

    def weight(self, evidence: Evidence) -> Tensor:
        """fp32 ``[L, H, S]``, what heavy hitters are heavy in."""
        assert evidence.mass is not None, "h2o needs attention mass"
        return evidence.mass
