"""What the engine knows of one sequence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kvgate.compressors.evidence import Span
from kvgate.compressors.policy import Need, Policy


@dataclass
class Sequence:
    """One row. Owned by the engine: release it there.

    Attributes:
        id: of the tables. ``length``: tokens seen so far, which is the next token's position.
        policy: None for the exact run. ``collect``: evidence to gather for it, or for forks to come.
        evicted: slots evicted so far, summed over layers and kv heads.
        tainted: evicted approximately at least once; nothing of it may enter the prefix cache.
        mass: fp32 ``[L, H, S]`` in slot order, zero in dead slots; None unless the policy needs it.
        queries: ``[L, Q, W, D]``, the last queries; None unless needed.
        state: the policy's own.
    """

    id: int
    length: int = 0
    protected: tuple[Span, ...] = ()
    policy: Policy | None = None
    collect: frozenset[Need] = frozenset()
    evicted: int = 0
    tainted: bool = False
    mass: Tensor | None = None
    queries: Tensor | None = None
    state: Any = None
    released: bool = field(default=False, repr=False)

    def needs(self, what: Need) -> bool:
        """Whether this evidence is gathered for it."""
        return what in self.collect
