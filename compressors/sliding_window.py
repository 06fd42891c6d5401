"""Sliding window: the most recent tokens.

Source: Beltagy et al. 2020, "Longformer", section 3.1, for attention in a window; used here as retention on a model
that was not trained with it. On layers that declare a window no larger than this one it is native, hence lossless.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from kvgate.compressors.evidence import Evidence, Keep, Span, in_spans
from kvgate.compressors.policy import Bounds, Policy, covered
from kvgate.compressors.ranking import keep_newest


@dataclass(frozen=True)
class SlidingWindow(Policy):
    """Keeps the ``window`` most recent positions; protected spans count against it."""

    name: ClassVar[str] = "sliding_window"
    window: int

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"policy sliding_window: window {self.window}: at least 1")

    @classmethod
    def for_budget(cls, budget: int) -> Self:
        return cls(window=budget)

    @property
    def budget(self) -> int:
        return self.window

    def decide(self, evidence: Evidence) -> Keep:
        forced = evidence.live & in_spans(evidence.positions, evidence.protected)
        return Keep(keep_newest(evidence, forced, self.bounds(evidence.protected).window))

    def bounds(self, protected: tuple[Span, ...]) -> Bounds:
        return Bounds(window=self.window - covered(protected), exempt=protected)
