"""What a verdict says. Plain values only, so that a leaderboard can write them as they are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Status = Literal["enable", "block", "inconclusive", "not_evaluable", "invalid"]
StratumStatus = Literal["non_inferior", "inferior", "inconclusive", "not_evaluable"]

_LARGEST_LOG = 700.0


@dataclass(frozen=True)
class Levels:
    """Error rates that a row is judged at.

    Attributes:
        enable: chance of enabling the row although it loses a margin or more; ``block``: of blocking it although no
            loss is larger.
        sequential: whether somebody looks more than once, so that floors, too, need limits for any number of looks.
        limits: whether to compute what only tables show; a simulation does without.
    """

    enable: float
    block: float
    sequential: bool = False
    limits: bool = True

    @property
    def wanted(self) -> float:
        """Log of the e-value that lets a stratum pass."""
        return math.log(1.0 / self.enable)


@dataclass(frozen=True)
class StratumResult:
    """A suite or a slice of one policy.

    Attributes:
        name: "retrieval" or "retrieval, length 1024, depth 0.2-0.4"; ``keys`` holds the same as fields.
        items, clusters: observations; clusters count.
        exact, policy: mean score, every cluster counting once; ``difference`` is policy minus exact.
        difference_items: the same with every item counting once.
        exact_low: lower limit of the exact run's mean score at the gate's floor confidence (one-sided); anytime-valid
            in a run that stopped when decided.
        exact_interval, policy_interval: limits of the mean over items, 95 % on each side, for a number fixed
            beforehand.
        lower, upper: anytime-valid limits of the difference, wrong with at most the row's ``alpha_enable`` and the
            gate's alpha, under both weightings. ``lower > -margin`` exactly when the stratum's e-value lets it pass.
        tango: Tango's limits for right-or-wrong items of their own clusters, 95 % on each side; None elsewhere.
        correlation: intra-cluster correlation of the differences; None where no cluster has two items.
        log_e_pass, log_e_block: log e-values against losing ``margin`` or more, and against losing no more than it.
        log_e_left_out: of a slice that is left out, the log e-value against its being worse than what is judged.
    """

    suite: str
    name: str
    keys: Mapping[str, Any]
    items: int
    clusters: int
    exact: float
    policy: float
    difference: float
    difference_items: float
    exact_low: float
    exact_interval: tuple[float, float]
    policy_interval: tuple[float, float]
    lower: float
    upper: float
    tango: tuple[float, float] | None
    correlation: float | None
    margin: float
    floor: float
    log_e_pass: float
    log_e_block: float
    log_e_left_out: float | None
    status: StratumStatus
    reason: str

    @property
    def e_pass(self) -> float:
        """E-value for passing, at most exp(700)."""
        return math.exp(min(self.log_e_pass, _LARGEST_LOG))

    @property
    def e_block(self) -> float:
        """E-value for a loss beyond the margin, at most exp(700)."""
        return math.exp(min(self.log_e_block, _LARGEST_LOG))


@dataclass(frozen=True)
class Scope:
    """Where a verdict holds; the caller adds model, revision and weights hash.

    Attributes:
        suites: suites in which the policy was judged.
        lengths: nominal lengths at which every such suite was competent and the policy evicted something.
        longest_tokens: most context tokens of an item at those lengths; 0 when there are none.
        excluded: slices that are out of scope because the exact run is not competent there.
        covered_lengths: nominal lengths at which the budget held everything, so that nothing was tested.
        pooled: what the gate judges together although it could be told apart, such as "retrieval: depth".
    """

    protocol: str
    suites: tuple[str, ...]
    lengths: tuple[int, ...]
    longest_tokens: int
    excluded: tuple[str, ...]
    covered_lengths: tuple[int, ...]
    pooled: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lengths:
    """Output tokens of one suite, mean over the judged items; ``ratio`` is policy over exact, None where both are 0."""

    suite: str
    exact: float
    policy: float
    ratio: float | None
    within: bool


@dataclass(frozen=True)
class RowVerdict:
    """The verdict on one policy, budget and protocol.

    Attributes:
        label: the cell label of the records; ``family`` groups the budgets of one policy.
        budget: tokens per (layer, kv head), mean over items where a ratio gives each length its own.
        reasons: sentences with numbers; ``flags``: what a reader should know but what decides nothing.
        worst_slice: name of the judged slice with the lowest difference.
        items, clusters: judged pairs and their clusters; ``covered_items``: pairs left out since nothing was evicted.
        capped_exact, capped_policy: scored answers cut by their token cap.
        log_e_block_row: pooled evidence that some stratum loses more than its margin; block at log(1/alpha).
        alpha_enable: this row's part of the gate's alpha, which holds over all rows of a run; 0 for a row that the
            plan does not name although it names one.
    """

    label: str
    policy: str
    family: str
    protocol: str
    budget: float
    ratio: float | None
    gate: str
    status: Status
    reasons: tuple[str, ...]
    flags: tuple[str, ...]
    suites: tuple[StratumResult, ...]
    slices: tuple[StratumResult, ...]
    worst_slice: str | None
    scope: Scope
    lengths: tuple[Lengths, ...]
    items: int
    clusters: int
    covered_items: int
    native: bool
    capped_exact: int
    capped_policy: int
    log_e_block_row: float
    alpha_enable: float

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready mapping."""
        return asdict(self)
