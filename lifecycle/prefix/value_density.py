"""Value density: expected reuse x prefill time saved, per byte held; with ghost counts and aging.

The frame is GreedyDual-Size-Frequency (Cherkasova 1998; Cao and Irani 1997): a block's score is the inflation level at
its last use plus its value, and the level rises to the score of whatever is evicted, so unused value ages. Blocks are
all of one size, so per byte is per block. The value of a block used ``x`` times lately (counts live on after eviction,
halved every ``half_life`` requests) at depth ``d``:

    x ** (steepness * missed) * (1 + depth_cost * d * max(0, missed - slack)) * fill_value

``missed`` is the share of recent reuse that found its block gone, known from the ghosts. Where nearly all reuse hits
anyway, the value is nearly constant and the order is that of LRU, which is right for a cache that is large enough; the
more is missed, the more is kept for the blocks that come back often. The depth factor is attention: prefill of a block
costs more the more tokens stand before it. A block the prompt only partly filled saves little and is rarely met again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvgate.lifecycle.prefix.policies import Score, Touch


@dataclass(frozen=True)
class ValueConfig:
    """Parameters of the value.

    Attributes:
        steepness: exponent of the use count when all reuse is missed.
        depth_cost: prefill time added per block of depth, relative to the first block's.
        slack: missed share below which depth does not matter.
        partial_value: factor for a partly filled block.
        half_life: requests after which an old use counts half.
        window: requests over which the missed share is measured (half-life of its sums).
        ghosts: blocks whose counts are remembered after eviction, at most.
    """

    steepness: float = 3.0
    depth_cost: float = 0.03
    slack: float = 0.1
    partial_value: float = 0.3
    half_life: float = 1000.0
    window: float = 300.0
    ghosts: int = 1_000_000


class ValueDensity:
    """See the module docstring."""

    def __init__(self, config: ValueConfig | None = None) -> None:
        self.config = config or ValueConfig()
        self._uses: OrderedDict[bytes, tuple[float, int]] = OrderedDict()
        self._level = 0.0
        self._met = 1.0
        self._missed = 1.0
        self._tick = 0
        self._exponent = self.config.steepness / 2.0
        self._depth_cost = 0.0

    def touch(self, use: Touch) -> Score:
        """Level plus value; ties go to the earlier touch first."""
        config = self.config
        if use.tick != self._tick:
            self._turn(use.tick)
        known = self._uses.get(use.key)
        count = 1.0
        if known is not None:
            count += known[0] * 0.5 ** ((use.tick - known[1]) / config.half_life)
            if use.hit:
                self._met += 1.0
            else:
                self._missed += 1.0
        self._uses[use.key] = (count, use.tick)
        self._uses.move_to_end(use.key)
        while len(self._uses) > config.ghosts:
            self._uses.popitem(last=False)
        value = count**self._exponent * (1.0 + self._depth_cost * use.depth)
        if use.fill < 1.0:
            value *= config.partial_value
        return self._level + value, float(use.tick)

    def evicted(self, key: bytes, score: Score) -> None:
        """The level rises to what the block was worth; its count stays as a ghost."""
        self._level = max(self._level, score[0])

    def expired(self, score: Score, now: float) -> bool:
        """Never."""
        return False

    def _turn(self, tick: int) -> None:
        config = self.config
        fade = 0.5 ** ((tick - self._tick) / config.window)
        self._met *= fade
        self._missed *= fade
        self._tick = tick
        missed = self._missed / max(self._met + self._missed, 1e-12)
        self._exponent = config.steepness * missed
        self._depth_cost = config.depth_cost * max(0.0, missed - config.slack)
