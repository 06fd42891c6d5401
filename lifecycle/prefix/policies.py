"""What every retention policy of the prefix cache answers: a score per touch; the leaf with the lowest goes first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

Score = tuple[float, float]


@dataclass(frozen=True)
class Touch:
    """One use of a cached block.

    Attributes:
        key: its chained key. depth: blocks before it. fill: share of the block that the prompt filled, in (0, 1].
        tick: number of the request that touches it. now: clock time. hit: it was in the cache already.
    """

    key: bytes
    depth: int
    fill: float
    tick: int
    now: float
    hit: bool


class RetentionPolicy(Protocol):
    """Scores blocks; knows no pages. One object serves one cache."""

    def touch(self, use: Touch) -> Score:
        """The block's score after this use; blocks with lower scores are evicted first."""

    def evicted(self, key: bytes, score: Score) -> None:
        """A block with this score has been evicted for space."""

    def expired(self, score: Score, now: float) -> bool:
        """Whether a block may no longer be used at clock time ``now``."""


class Recency:
    """LRU: the block unused for longest goes first."""

    def touch(self, use: Touch) -> Score:
        """The request's number; within one request the deeper block goes first."""
        return float(use.tick), -float(use.depth)

    def evicted(self, key: bytes, score: Score) -> None:
        """Nothing to remember."""

    def expired(self, score: Score, now: float) -> bool:
        """Never."""
        return False


class Frequency:
    """LFU: the block used least often since it came in goes first; ties by recency."""

    def __init__(self) -> None:
        self._count: dict[bytes, int] = {}

    def touch(self, use: Touch) -> Score:
        """Uses so far, then the request's number."""
        count = self._count.get(use.key, 0) + 1
        self._count[use.key] = count
        return float(count), float(use.tick)

    def evicted(self, key: bytes, score: Score) -> None:
        """Forget its count."""
        self._count.pop(key, None)

    def expired(self, score: Score, now: float) -> bool:
        """Never."""
        return False


class TimeToLive:
    """TTL: a block lives for a fixed time after its last use; the one that would die first goes first.

    Args:
        seconds: life after the last use, in the unit of the clock.
    """

    def __init__(self, seconds: float = 600.0) -> None:
        if seconds <= 0:
            raise ValueError(f"ttl of {seconds:g}: needs more than 0")
        self.seconds = seconds

    def touch(self, use: Touch) -> Score:
        """Time of death; within one request the deeper block goes first."""
        return use.now + self.seconds, -float(use.depth)

    def evicted(self, key: bytes, score: Score) -> None:
        """Nothing to remember."""

    def expired(self, score: Score, now: float) -> bool:
        """Its time has come."""
        return score[0] <= now
