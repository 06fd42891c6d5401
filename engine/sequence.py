"""What the engine knows of one sequence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kvgate.compressors.budgets import Limit
from kvgate.compressors.evidence import LastQueries, Need, QueryMoments, Span
from kvgate.compressors.policy import Policy
from kvgate.engine.moments import RunningMoments


@dataclass
class Sequence:
    """One row. Owned by the engine: release it there.

    Attributes:
        id: of the tables. ``length``: tokens seen so far, which is the next token's position.
        policy: None for the exact run. ``limit``: its budget, read once when it took over.
        collect: evidence to gather for it, or for forks to come.
        evicted: slots evicted so far, summed over layers and kv heads.
        tainted: evicted approximately at least once; nothing of it may enter the prefix cache.
        mass: fp32 ``[L, H, S]`` in slot order, zero in dead slots; None unless the policy needs it.
        queries: ``[L, Q, W, D]``, the last queries; None unless needed.
        moments: of the queries, one for each number of first tokens left out.
        tokens: ids seen so far; kept only where a policy may repeat them.
        decided: the policy has evicted once, or had nothing to evict when it was asked.
        probed: extra tokens run for its policy's evidence.
        state: the policy's own.
    """

    id: int
    length: int = 0
    protected: tuple[Span, ...] = ()
    policy: Policy | None = None
    limit: Limit | None = None
    collect: frozenset[Need] = frozenset()
    evicted: int = 0
    tainted: bool = False
    mass: Tensor | None = None
    queries: Tensor | None = None
    moments: dict[int, RunningMoments] = field(default_factory=dict)
    tokens: tuple[int, ...] = ()
    decided: bool = False
    probed: int = 0
    state: Any = None
    released: bool = field(default=False, repr=False)

    def needs(self, what: Need) -> bool:
        """Whether this evidence is gathered for it."""
        return what in self.collect

    @property
    def window(self) -> int:
        """How many of its last queries are kept."""
        return max((need.count for need in self.collect if isinstance(need, LastQueries)), default=0)

    @property
    def skips(self) -> tuple[int, ...]:
        """First tokens that each kind of query moments it needs leaves out."""
        return tuple(sorted(need.skip for need in self.collect if isinstance(need, QueryMoments)))

    @property
    def observed(self) -> bool:
        """Whether its queries are looked at in any way."""
        return bool(self.window or self.skips)

    def gather(self, needs: frozenset[Need]) -> None:
        """From now on gather ``needs`` only, and forget the rest."""
        self.collect = needs
        self.mass = self.mass if self.needs("mass") else None
        self.queries = self.queries if self.window else None
        self.moments = {skip: self.moments[skip] for skip in self.skips if skip in self.moments}
        self.tokens = self.tokens if self.needs("probe") else ()
