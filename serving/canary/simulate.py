"""Simulated traffic through the real controller: how often it errs at the margin, and what bad policies get to see."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvgate.evals.leaderboard.rollout import Rollout
from kvgate.evals.stats.betting import FRACTIONS
from kvgate.serving.canary.controller import Controller
from kvgate.serving.canary.evidence import START_LOGS, STARTS
from kvgate.serving.canary.journal import Event, MemoryJournal
from kvgate.serving.canary.progress import SLICES, Judge
from kvgate.serving.canary.seen import GUARDS, Seen

Floats = NDArray[np.float64]
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


Loss = Callable[[np.random.Generator, int], Floats]

AT_THE_MARGIN: dict[str, Loss] = {
    "rare whole losses": lambda random, n: -(random.random(n) < JUDGE.margin).astype(float),
    "noise both ways": lambda random, n: random.choice([-1.0, 0.0, 1.0], n, p=[0.115, 0.8, 0.085]),
    "the same small loss always": lambda random, n: np.full(n, -JUDGE.margin),
}


@dataclass(frozen=True)
class AtTheMargin:
    """One replicate: a policy that loses exactly the margin, in the shadow and under half of the traffic.

    Attributes:
        shadow: quality of each conversation while it is watched.
        quality, tokens: of each conversation under the policy; ``high``: whether it suffered, by guard.
    """

    shadow: Floats
    quality: Floats
    tokens: NDArray[np.int64]
    high: dict[str, Floats]

    @classmethod
    def draw(cls, loss: Loss, seed: int, conversations: int = 1500) -> AtTheMargin:
        """``conversations`` in the shadow, and half as many under the policy."""
        random, half = np.random.default_rng(seed), conversations // 2
        limits = JUDGE.rollout.limits
        return cls(
            loss(random, conversations),
            loss(random, half),
            random.integers(0, JUDGE.longest, half),
            {name: (random.random(half) < getattr(limits, name)).astype(float) for name in GUARDS},
        )

    def leaves_shadow(self) -> bool:
        """Whether it ever gets traffic: the false promotions, and more. By the streams' own formulas."""
        weights = JUDGE.weights()
        quality = path_block(self.shadow, JUDGE.margin)
        short = path_block(self.shadow, JUDGE.rollout.slice_margin)  # all prompts are short
        rest = 1.0 - weights["quality"] - weights["quality:short"]
        total = weights["quality"] * np.exp(quality) + weights["quality:short"] * np.exp(short) + rest
        blocked = total >= 1.0 / JUDGE.alpha
        passed = path_pass(self.shadow, JUDGE.margin) >= math.log(1.0 / JUDGE.alpha)
        passed[: JUDGE.rollout.shadow_pairs - 1] = False
        return bool(passed.any() and (not blocked.any() or passed.argmax() < blocked.argmax()))

    def rolled_back(self) -> bool:
        """Whether it ever goes, with every measure at its margin. By the streams' own formulas."""
        weights = JUDGE.weights()
        total = weights["quality"] * np.exp(path_block(self.quality, JUDGE.margin))
        parts = np.array([JUDGE.slice_of(int(tokens)) for tokens in self.tokens])
        for part in SLICES:
            mine = parts == part
            path = np.concatenate([[0.0], path_block(self.quality[mine], JUDGE.rollout.slice_margin)])
            total = total + weights[f"quality:{part}"] * np.exp(path[np.cumsum(mine)])
        guards = np.zeros(len(total) + 1)
        for name, high in self.high.items():
            path = np.concatenate([[0.0], path_block(-high, getattr(JUDGE.rollout.limits, name))])
            guards = guards + weights[name] * np.exp(path)
        # A look after each conversation under the policy, and after the exact one that its guards are compared with.
        return bool(max((total + guards[:-1]).max(), (total + guards[1:]).max()) >= 1.0 / JUDGE.alpha)


def path_pass(values: Floats, margin: float) -> Floats:
    """A stream's ``log_pass`` after each of ``values``."""
    return _log_mean(np.cumsum(_bets(values, -margin), axis=0))


def path_block(values: Floats, margin: float) -> Floats:
    """A stream's ``log_block`` after each of ``values``."""
    wealth = np.cumsum(_bets(-values, margin), axis=0)
    paths = []
    for start, weight in zip(STARTS, START_LOGS, strict=True):
        path = np.zeros(len(values))
        if start < len(values):
            before = wealth[start - 1] if start else 0.0
            path[start:] = _log_mean(wealth[start:] - before)
        paths.append(path + weight)
    return np.asarray(np.logaddexp.reduce(paths, axis=0))


def _bets(values: Floats, mu: float) -> Floats:
    return np.asarray(np.log1p((values[:, None] - mu) * (np.asarray(FRACTIONS) / (1.0 + mu))))


def _log_mean(logs: Floats) -> Floats:
    return np.asarray(np.logaddexp.reduce(logs, axis=1) - math.log(logs.shape[1]))


def leaves_shadow(drawn: AtTheMargin) -> bool:
    """As :meth:`AtTheMargin.leaves_shadow`, by the controller itself."""
    controller = Controller(JUDGE, MemoryJournal(), "promotion", 0.0)
    for i, quality in enumerate(drawn.shadow.tolist()):
        controller.observe(Seen(f"c{i}", "exact", 100, quality=quality, first_token_s=0.1, gap_s=0.01), 2.0 * i)
        controller.tick(2.0 * i + 1.5)
        if controller.progress.state != "shadow":
            return controller.progress.state != "rolled_back"
    return False


def rolled_back(drawn: AtTheMargin) -> bool:
    """As :meth:`AtTheMargin.rolled_back`, by the controller itself: exact and canary conversations take turns."""
    controller = Controller(replace(JUDGE, shadow_only=True), MemoryJournal(), "rollback", 0.0)
    progress = controller.progress
    progress.apply(Event(0, 0.0, "move", {"state": "canary", "stage": 2, "why": "by hand"}))
    progress.apply(Event(0, 0.0, "times", {"first_token_s": 1.0, "gap_s": 1.0}))
    for i, quality in enumerate(drawn.quality.tolist()):
        high = {name: values[i] > 0.0 for name, values in drawn.high.items()}
        under = Seen(
            f"c{i}",
            "canary",
            int(drawn.tokens[i]),
            quality=quality,
            failed=high["failures"],
            allocation_failure=high["allocation_failures"],
            preemptions=float(high["preemptions"]),
            recomputed=float(high["recomputed_tokens"]),
            first_token_s=9.0 if high["slow_first_token"] else 0.1,
            gap_s=9.0 if high["slow_between_tokens"] else 0.01,
        )
        for place, seen in enumerate((under, Seen(f"e{i}", "exact", 100, first_token_s=0.1, gap_s=0.01))):
            now = 4.0 * i + 2.0 * place
            controller.observe(seen, now)
            controller.tick(now + 1.5)
            if progress.state == "rolled_back":
                return True
    return False
