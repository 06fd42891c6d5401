"""What became of requests, and of the conversations they belong to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

Arm = Literal["exact", "canary"]
GUARDS = (
    "failures",
    "allocation_failures",
    "preemptions",
    "recomputed_tokens",
    "slow_first_token",
    "slow_between_tokens",
)


@dataclass(frozen=True)
class Seen:
    """One in-scope request that has ended.

    Attributes:
        conversation: key it was routed by. arm: how it was answered. tokens: of its prompt.
        quality: policy minus exact, in [-1, 1]; None where no comparison was asked for.
        missing: why a comparison that was asked for did not come about.
        failed, allocation_failure: it failed; for want of memory.
        preemptions: times it was preempted, and its share in preemptions of others.
        recomputed: share of its tokens that were computed again.
        first_token_s, gap_s: time to the first token, longest gap between two; None where there were none.
    """

    conversation: str
    arm: Arm
    tokens: int
    quality: float | None = None
    missing: str | None = None
    failed: bool = False
    allocation_failure: bool = False
    preemptions: float = 0.0
    recomputed: float = 0.0
    first_token_s: float | None = None
    gap_s: float | None = None


@dataclass(frozen=True)
class Slow:
    """Times beyond which a request counts as slow."""

    first_token_s: float = math.inf
    gap_s: float = math.inf


@dataclass
class Conversation:
    """An open conversation: sums over its requests, closed into one value a measure."""

    arm: Arm
    last: float
    turns: int = 0
    longest: int = 0
    qualities: list[float] = field(default_factory=list)
    guards: dict[str, float] = field(default_factory=lambda: dict.fromkeys(GUARDS, 0.0))

    def add(self, seen: Seen, slow: Slow, now: float) -> None:
        """One more request."""
        self.last = now
        self.turns += 1
        self.longest = max(self.longest, seen.tokens)
        if seen.quality is not None:
            self.qualities.append(seen.quality)
        first, gap = seen.first_token_s, seen.gap_s
        for name, value in (
            ("failures", float(seen.failed)),
            ("allocation_failures", float(seen.allocation_failure)),
            ("preemptions", min(1.0, seen.preemptions)),
            ("recomputed_tokens", min(1.0, seen.recomputed)),
            ("slow_first_token", float(first is not None and first > slow.first_token_s)),
            ("slow_between_tokens", float(gap is not None and gap > slow.gap_s)),
        ):
            self.guards[name] = max(self.guards[name], value)

    @property
    def quality(self) -> float | None:
        """Mean over its comparisons."""
        return sum(self.qualities) / len(self.qualities) if self.qualities else None


class Percentile:
    """The 99th percentile of the latest values."""

    def __init__(self, keep: int = 1000, least: int = 50) -> None:
        self._keep, self._least = keep, least
        self._values: list[float] = []

    def add(self, value: float | None) -> None:
        """One more; None is nothing."""
        if value is not None and math.isfinite(value):
            self._values.append(value)
            del self._values[: -self._keep]

    @property
    def p99(self) -> float:
        """Infinite while there are too few."""
        if len(self._values) < self._least:
            return math.inf
        return sorted(self._values)[min(len(self._values) - 1, math.ceil(0.99 * len(self._values)) - 1)]
