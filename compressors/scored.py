"""Policies that give every slot a score, apart from how slots are then chosen.

Any score goes with any budget shape. Ada-KV (Feng et al. 2024, "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget
Allocation", section 3.2 and algorithm 1) is ``shape: layer`` with ``floor: 0.2``: the heads of a layer share a budget,
and a share of it is each head's own.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, Self, get_args

import torch
from torch import Tensor

from kvgate.compressors.budgets import allowed
from kvgate.compressors.evidence import Evidence, Keep, in_spans
from kvgate.compressors.paging import whole_pages
from kvgate.compressors.policy import Policy, Shape, When
from kvgate.compressors.ranking import keep_highest, keep_highest_together, score_keys


@dataclass(frozen=True)
class Scored(Policy):
    """Keeps the slots with the highest score.

    Attributes:
        tokens: the budget. ``shape``: whom it belongs to.
        floor: share of the budget that is each head's own where heads share one.
        when: "once", after the prompt (whatever comes later stays), or at every "step".
    """

    tokens: int
    shape: Shape = "head"
    floor: float = 0.0
    when: When = "once"

    def __post_init__(self) -> None:
        for field, known in (("shape", get_args(Shape)), ("when", get_args(When))):
            if getattr(self, field) not in known:
                raise ValueError(
                    f"policy {self.name}: {field} {getattr(self, field)!r}: choose one of {', '.join(known)}"
                )
        if not 0.0 <= self.floor <= 1.0:
            raise ValueError(f"policy {self.name}: floor {self.floor}: a share of the budget, from 0 to 1")
        if self.tokens < 1:
            raise ValueError(f"policy {self.name}: budget {self.tokens}: at least 1")

    @classmethod
    def for_budget(cls, budget: int, **params: Any) -> Self:
        least = cls.smallest_budget(**params)
        if budget < least:
            raise ValueError(f"policy {cls.name}: budget {budget} is too small; use at least {least}")
        return cls(tokens=budget, **params)

    @property
    def budget(self) -> int:
        return self.tokens

    @property
    def budget_shape(self) -> Shape:
        return self.shape

    @property
    def decides(self) -> When:
        return self.when

    @abstractmethod
    def score(self, evidence: Evidence) -> Tensor:
        """fp32 ``[L, H, S]``: the higher, the longer it stays. Anything in dead slots."""

    def recent(self) -> int:
        """Newest tokens that stay whatever their score, as far as the budget goes."""
        return 0

    def scoring(self) -> tuple[Any, ...]:
        """What the score depends on: policies of equal ``scoring`` share one."""
        chosen = {"tokens", "shape", "floor", "when"}
        return (type(self), *((name, value) for name, value in asdict(self).items() if name not in chosen))

    def decide(self, evidence: Evidence) -> Keep:
        return Keep(self.select(evidence, self.score(evidence)))

    def select(self, evidence: Evidence, scores: Tensor) -> Tensor:
        """bool ``[L, H, S]``: what must stay, and of the others those with the highest score; ties to the older.

        Heads that share a budget are cut to whole pages where nothing is evicted later.
        """
        positions, live = evidence.positions, evidence.live
        forced = self.forced(evidence)
        if self.shape == "head":
            keys = score_keys(scores, positions)
            return forced | keep_highest(keys, live & ~forced, self.tokens - forced.sum(-1))
        heads = live.shape[0] * live.shape[1]
        index = torch.arange(heads, device=live.device).reshape(*live.shape[:2], 1)
        keys = score_keys(scores, positions * heads + index)  # all different, across heads too
        own = int(self.floor * self.tokens)
        forced = forced | keep_highest(keys, live & ~forced, own - forced.sum(-1))
        most = allowed(self, (live.shape[0], live.shape[1]), evidence.exact_slots, evidence.length)
        kept = forced | keep_highest_together(keys, live & ~forced, forced, most, self.shape)
        if self.when == "step" or evidence.page_size == 1:
            return kept
        counts = whole_pages(kept.sum(-1), forced.sum(-1), live.sum(-1), evidence.page_size, self.shape)
        return forced | keep_highest(keys, live & ~forced, counts - forced.sum(-1))

    def forced(self, evidence: Evidence) -> Tensor:
        """bool ``[L, H, S]``: forced spans and, as far as the budget goes, the ``recent`` newest."""
        forced = evidence.live & in_spans(evidence.positions, self.forced_spans(evidence.protected))
        if not self.recent():
            return forced
        newest = evidence.live & ~forced & (evidence.positions >= evidence.length - self.recent())
        return forced | keep_highest(evidence.positions.long(), newest, self.tokens - forced.sum(-1))

    def describe(self) -> dict[str, Any]:
        return {
            name: value for name, value in asdict(self).items() if name != "tokens" and (name, value) != ("floor", 0)
        }
