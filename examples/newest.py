"""A policy in one file: ``kvgate run --policy newest:Newest@0.5``, from this folder."""

from dataclasses import dataclass
from typing import ClassVar

from kvgate.compressors.evidence import Evidence, Keep, in_spans
from kvgate.compressors.policy import Policy, covered
from kvgate.compressors.ranking import keep_newest


@dataclass(frozen=True)
class Newest(Policy):
    """Keeps the newest tokens, beside those that no policy may evict."""

    name: ClassVar[str] = "newest"
    tokens: int

    @classmethod
    def for_budget(cls, budget: int) -> "Newest":
        """The policy at ``budget`` tokens a head."""
        return cls(tokens=budget)

    @property
    def budget(self) -> int:
        """Most live tokens a head."""
        return self.tokens

    def decide(self, evidence: Evidence) -> Keep:
        """Forced tokens first, then the newest."""
        forced = evidence.live & in_spans(evidence.positions, evidence.protected)
        return Keep(keep_newest(evidence, forced, self.tokens - covered(evidence.protected)))
