"""How an enabled policy meets real traffic: stages, and what it may cost beside the exact arm."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import ClassVar, Literal

from kvgate.typed import STRICT


@dataclass(frozen=True)
class Stage:
    """A share of in-scope conversations under the policy, and the pairs it takes before the next one."""

    __pydantic_config__: ClassVar = STRICT

    traffic: float
    minimum_pairs: int

    def __post_init__(self) -> None:
        if not 0.0 < self.traffic <= 1.0:
            raise ValueError(f"traffic is {self.traffic}, needs more than 0 and at most 1")
        if self.minimum_pairs < 1:
            raise ValueError(f"minimum_pairs is {self.minimum_pairs}, needs at least 1")


@dataclass(frozen=True)
class Limits:
    """Largest difference, policy arm minus exact arm, of each mean over conversations; all lie in [0, 1].

    Attributes:
        failures: conversations with a failed request. allocation_failures: with one that got no memory.
        preemptions: with one that was preempted or took the pages that others were preempted for.
        recomputed_tokens: share of tokens computed again.
        slow_first_token, slow_between_tokens: conversations slower than the exact arm's 99th percentile.
    """

    __pydantic_config__: ClassVar = STRICT

    failures: float = 0.02
    allocation_failures: float = 0.02
    preemptions: float = 0.03
    recomputed_tokens: float = 0.03
    slow_first_token: float = 0.03
    slow_between_tokens: float = 0.03

    def __post_init__(self) -> None:
        for each in fields(self):
            if not 0.0 < getattr(self, each.name) < 1.0:
                raise ValueError(f"{each.name} is {getattr(self, each.name)}, needs a number between 0 and 1")


DEFAULT_STAGES = (Stage(0.01, 30), Stage(0.05, 80), Stage(0.25, 250))


@dataclass(frozen=True)
class Rollout:
    """Settings of the canary controller (:mod:`kvgate.serving.canary`).

    Attributes:
        measure: what quality is: "score", task scores where requests carry a reference, or "agreement", the share of
            tokens that both would have chosen along the answer.
        slice_margin: accepted loss in each third of prompt lengths.
        shadow_fraction: share of in-scope exact conversations that are shadowed before traffic begins, and
            watch_fraction from then on, full traffic included.
        shadow_pairs: pairs before traffic begins. most_missing: share of lost comparisons beyond which nothing moves.
        idle_s: a conversation counts once it was idle so long, or had most_turns turns.
    """

    __pydantic_config__: ClassVar = STRICT

    slice_margin: float = 0.10
    measure: Literal["score", "agreement"] = "score"
    stages: tuple[Stage, ...] = DEFAULT_STAGES
    limits: Limits = field(default_factory=Limits)
    shadow_fraction: float = 1.0
    watch_fraction: float = 0.05
    shadow_pairs: int = 200
    most_missing: float = 0.05
    idle_s: float = 120.0
    most_turns: int = 64

    def __post_init__(self) -> None:
        shares = [stage.traffic for stage in self.stages]
        if not shares or any(a >= b for a, b in pairwise(shares)) or shares[-1] >= 1.0:
            raise ValueError(
                f"stages have traffic {shares}; give rising shares under 1, full traffic follows by itself"
            )
        for name in ("slice_margin", "shadow_fraction", "watch_fraction", "most_missing"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}, needs more than 0 and at most 1")
        if self.shadow_pairs < 1 or self.most_turns < 1 or self.idle_s <= 0:
            raise ValueError("shadow_pairs, most_turns and idle_s need to be positive")
