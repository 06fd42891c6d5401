"""Simulated traffic through the real controller: how often it errs at the margin, and what bad policies get to see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from kvgate.evals.leaderboard.rollout import Rollout
from kvgate.serving.canary.controller import Controller
from kvgate.serving.canary.journal import Event, MemoryJournal
from kvgate.serving.canary.progress import Judge
from kvgate.serving.canary.seen import GUARDS, Seen

JUDGE = Judge(Rollout(idle_s=1.0), margin=0.03, alpha=0.05, longest=8192)


class Policy(Protocol):
    """What a simulated policy does to one request."""

    def __call__(self, random: np.random.Generator, seen: Seen, answered: int) -> Seen:
        """``seen`` as the exact arm would show it, changed; ``answered``: requests it answered before."""


def healthy(random: np.random.Generator, seen: Seen) -> Seen:
    """What traffic does by itself, whichever arm: now and then a preemption, a slow answer."""
    return replace(
        seen,
        preemptions=float(random.random() < 0.03),
        recomputed=0.3 * float(random.random() < 0.03),
        first_token_s=float(random.lognormal(-2.0, 0.5)),
        gap_s=float(random.lognormal(-3.0, 0.4)),
    )


def good(random: np.random.Generator, seen: Seen, answered: int) -> Seen:
    """One answer in a hundred is worse, as many are better."""
    return replace(seen, quality=float(random.choice([-1.0, 0.0, 1.0], p=[0.01, 0.98, 0.01])))


def loses_long(random: np.random.Generator, seen: Seen, answered: int) -> Seen:
    """Half of the answers to long conversations are wrong; these are so few that the mean stays inside the margin."""
    long = seen.tokens > 2 * JUDGE.longest // 3
    return replace(seen, quality=-1.0 if long and random.random() < 0.5 else 0.0)


def grows(random: np.random.Generator, seen: Seen, answered: int) -> Seen:
    """Answers are fine, but its pages come from others: a quarter of its requests have somebody preempted."""
    if seen.arm == "exact":
        return replace(seen, quality=0.0)
    return replace(seen, quality=0.0, preemptions=seen.preemptions + float(random.random() < 0.25))


def breaks(random: np.random.Generator, seen: Seen, answered: int) -> Seen:
    """Good while it is watched and for the first 500 requests that it answers, then every other answer is wrong."""
    return replace(seen, quality=-1.0 if answered > 500 and random.random() < 0.5 else 0.0)


DRILL: dict[str, Policy] = {
    "good": good,
    "loses only long conversations": loses_long,
    "preempts others by growing": grows,
    "breaks after 500 requests": breaks,
}


@dataclass(frozen=True)
class Outcome:
    """How a rollout ended. ``requests``: in scope, all arms; ``compared``: that the policy ran on, shadows included;
    ``exposed``: answered under the policy."""

    state: str
    requests: int
    compared: int
    exposed: int
    why: str


def drill(policy: Policy, seed: int, most: int = 100_000, judge: Judge = JUDGE) -> Outcome:
    """One rollout from its first shadow on, until it is rolled back, has full traffic, or saw ``most`` requests.

    Conversations have 1 to 6 turns; one in twenty is long.
    """
    random = np.random.default_rng(seed)
    controller = Controller(judge, MemoryJournal(), f"drill {seed}", 0.0)
    now, requests, compared = 0.0, 0, 0
    while requests < most and controller.progress.state not in ("full", "rolled_back"):
        name = f"c{requests}"
        low, high = (5600, 8000) if random.random() < 0.05 else (100, 2600)
        for _ in range(int(random.integers(1, 7))):
            requests += 1
            now += 0.1
            seen = healthy(random, Seen(name, controller.arm(name), int(random.integers(low, high))))
            compares = controller.compares(name)
            changed = policy(random, seen, controller.progress.exposed)
            compared += compares or seen.arm == "canary"
            controller.observe(changed if compares else replace(changed, quality=None), now)
        now += 2.0
        controller.tick(now)
    progress = controller.progress
    return Outcome(progress.state, requests, compared, progress.exposed, progress.why)


Loss = Callable[[np.random.Generator], float]

AT_THE_MARGIN: dict[str, Loss] = {
    "rare whole losses": lambda random: -float(random.random() < JUDGE.margin),
    "noise both ways": lambda random: float(random.choice([-1.0, 0.0, 1.0], p=[0.115, 0.8, 0.085])),
    "the same small loss always": lambda random: -JUDGE.margin,
}


def leaves_shadow(loss: Loss, seed: int, conversations: int = 1500) -> bool:
    """Whether a policy that loses exactly the margin ever gets traffic: the false promotions, and more."""
    random = np.random.default_rng(seed)
    controller = Controller(JUDGE, MemoryJournal(), f"promotion {seed}", 0.0)
    for i in range(conversations):
        seen = Seen(f"c{i}", "exact", 100, quality=loss(random), first_token_s=0.1, gap_s=0.01)
        controller.observe(seen, 2.0 * i)
        controller.tick(2.0 * i + 1.5)
        if controller.progress.state != "shadow":
            return controller.progress.state != "rolled_back"
    return False


def rolled_back(loss: Loss, seed: int, conversations: int = 1500) -> bool:
    """Whether a policy under half of the traffic that loses exactly the margin, in every measure, is rolled back."""
    random = np.random.default_rng(seed)
    controller = Controller(replace(JUDGE, shadow_only=True), MemoryJournal(), f"rollback {seed}", 0.0)
    progress = controller.progress
    by_hand = {"state": "canary", "stage": 2, "why": "by hand"}
    progress.apply(Event(0, 0.0, "move", by_hand))
    progress.apply(Event(0, 0.0, "times", {"first_token_s": 1.0, "gap_s": 1.0}))
    limits = JUDGE.rollout.limits
    for i in range(conversations):
        canary = i % 2 == 0
        high = {name: canary and random.random() < getattr(limits, name) for name in GUARDS}
        seen = Seen(
            f"c{i}",
            "canary" if canary else "exact",
            int(random.integers(0, JUDGE.longest)),
            quality=loss(random) if canary else None,
            failed=high["failures"],
            allocation_failure=high["allocation_failures"],
            preemptions=float(high["preemptions"]),
            recomputed=float(high["recomputed_tokens"]),
            first_token_s=9.0 if high["slow_first_token"] else 0.1,
            gap_s=9.0 if high["slow_between_tokens"] else 0.01,
        )
        controller.observe(seen, 2.0 * i)
        controller.tick(2.0 * i + 1.5)
        if progress.state == "rolled_back":
            return True
    return False
