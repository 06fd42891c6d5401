"""StreamingLLM: attention sinks and a recent window.

Source: Xiao et al. 2024 (ICLR), "Efficient Streaming Language Models with Attention Sinks", section 3.2; four sinks
from section 3.2 and table 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from kvgate.compressors.evidence import Evidence, Keep, Span, in_spans
from kvgate.compressors.policy import Bounds, Policy, covered
from kvgate.compressors.ranking import keep_newest

PAPER_SINKS = 4


@dataclass(frozen=True)
class StreamingLLM(Policy):
    """Keeps the first ``sinks`` tokens and the ``window`` most recent ones.

    ``positions``: "rebased" is the paper's, distances are counted inside the cache; "original" keeps every token where
    it was. Rebased needs protected spans to continue the sinks, since one distance serves all tokens before the window.
    """

    name: ClassVar[str] = "streaming_llm"
    window: int
    sinks: int = PAPER_SINKS
    positions: Literal["original", "rebased"] = "original"

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"policy streaming_llm: window {self.window}: at least 1")
        if self.sinks < 0:
            raise ValueError(f"policy streaming_llm: sinks {self.sinks}: not negative")
        if self.positions not in ("original", "rebased"):
            raise ValueError(f"policy streaming_llm: positions {self.positions!r}: original or rebased")

    @classmethod
    def for_budget(
        cls, budget: int, sinks: int = PAPER_SINKS, positions: Literal["original", "rebased"] = "original"
    ) -> Self:
        if budget <= sinks:
            raise ValueError(f"policy streaming_llm: budget {budget} leaves no window beside {sinks} sinks")
        return cls(window=budget - sinks, sinks=sinks, positions=positions)

    @classmethod
    def smallest_budget(cls, sinks: int = PAPER_SINKS, positions: str = "original") -> int:
        return sinks + 1

    @property
    def budget(self) -> int:
        return self.sinks + self.window

    def forced_spans(self, protected: tuple[Span, ...]) -> tuple[Span, ...]:
        return (Span(0, self.sinks), *protected) if self.sinks else protected

    def decide(self, evidence: Evidence) -> Keep:
        forced = evidence.live & in_spans(evidence.positions, self.forced_spans(evidence.protected))
        return Keep(keep_newest(evidence, forced, self.bounds(evidence.protected).window))

    def check(self, protected: tuple[Span, ...]) -> None:
        super().check(protected)
        if self.positions == "rebased":
            self._prefix(protected)

    def bounds(self, protected: tuple[Span, ...]) -> Bounds:
        forced = self.forced_spans(protected)
        rebased = self._prefix(protected) if self.positions == "rebased" else 0
        return Bounds(self.budget - covered(forced), forced, rebased)

    def _prefix(self, protected: tuple[Span, ...]) -> int:
        """End of the contiguous forced prefix. ValueError if something protected lies beyond it."""
        end = 0
        for span in sorted(self.forced_spans(protected), key=lambda span: span.start):
            if span.start > end:
                raise ValueError(
                    f"policy streaming_llm: protected span [{span.start}, {span.end}) does not continue the sinks, "
                    "which positions: rebased needs; use positions: original"
                )
            end = max(end, span.end)
        return end
