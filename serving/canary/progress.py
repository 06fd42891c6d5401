"""Where a rollout stands, as a fold over its journal's events; and what to do next, as a pure decision.

The evidence of a verdict names a rollout: a policy that was rolled back stays so until a new verdict begins another.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kvgate.evals.leaderboard.rollout import Rollout
from kvgate.serving.canary.evidence import Stream, combined_block
from kvgate.serving.canary.journal import Event
from kvgate.serving.canary.seen import GUARDS, Slow

State = Literal["shadow", "canary", "full", "rolled_back"]
SLICES = ("short", "medium", "long")
_RECENT = 100  # comparisons over which lost ones are counted


@dataclass(frozen=True)
class Judge:
    """What a rollout is judged by. ``margin``, ``alpha``: of the canary config. ``shadow_only``: no traffic ever."""

    rollout: Rollout
    margin: float
    alpha: float
    longest: int
    shadow_only: bool = False

    def slice_of(self, tokens: int) -> str:
        """Third of the verdict's length that a prompt falls into."""
        return SLICES[min(2, 3 * tokens // max(1, self.longest + 1))]

    def weights(self) -> dict[str, float]:
        """Shares of the error that each stream may spend on blocking: half for quality, half for the guards."""
        shares = {"quality": 0.25} | {f"quality:{name}": 0.25 / len(SLICES) for name in SLICES}
        return shares | {name: 0.5 / len(GUARDS) for name in GUARDS}


@dataclass(frozen=True)
class Move:
    """A decision: the state to go to, the stage (index) where that is "canary", and why."""

    state: State
    stage: int
    why: str


@dataclass
class Progress:
    """See the module docstring.

    Attributes:
        state, stage: where it stands. since: time of the last move. why: of the last move.
        pairs: comparisons closed in this state. arms: pairs of a canary and an exact conversation in this stage.
        streams: evidence by measure. recent: the latest comparisons, None or why they were lost.
        exposed: requests that were answered under the policy.
        slow: the exact arm's 99th percentiles as of the last move; None while they are not known.
    """

    judge: Judge
    state: State = "shadow"
    stage: int = 0
    since: float = 0.0
    why: str = "nothing was seen yet"
    pairs: int = 0
    arms: int = 0
    exposed: int = 0
    verdict: str = ""
    streams: dict[str, Stream] = field(default_factory=dict)
    recent: deque[str | None] = field(default_factory=lambda: deque(maxlen=_RECENT))
    slow: Slow | None = None
    history: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._reset()

    @property
    def traffic(self) -> float:
        """Share of in-scope conversations under the policy."""
        if self.state == "full":
            return 1.0
        return self.judge.rollout.stages[self.stage].traffic if self.state == "canary" else 0.0

    @property
    def place(self) -> str:
        """The state in words."""
        return f"canary {100 * self.traffic:g} %" if self.state == "canary" else self.state.replace("_", " ")

    def apply(self, event: Event) -> None:
        """One event of the journal."""
        data = event.data
        match event.kind:
            case "begin":
                if data["verdict"] != self.verdict:
                    self._begin(data, event.at)
                self.history.append(event)
            case "pair":
                self._pair(data)
            case "arms":
                self._arms(data["differences"])
            case "lost":
                self.recent.append(data["why"])
            case "exposed":
                self.exposed = data["requests"]
            case "move":
                self._move(Move(data["state"], data["stage"], data["why"]), event.at)
                self.history.append(event)
            case "times":
                self.slow = Slow(data["first_token_s"], data["gap_s"])
            case "note":
                self.history.append(event)

    # -- decisions --------------------------------------------------------------------------------------------------

    def decide(self) -> Move | None:
        """Roll back, go on a step, or stay (None). Valid at any time and however often it is asked."""
        if self.state == "rolled_back":
            return None
        loss = self.block()
        if loss is not None:
            return Move("rolled_back", self.stage, loss)
        if self.state == "full" or self.waiting() is not None:
            return None
        return self.next_step("enough pairs, and no loss beyond the margins")

    def next_step(self, why: str) -> Move:
        """The state after this one."""
        if self.state == "shadow":
            return Move("canary", 0, why)
        last = self.stage + 1 >= len(self.judge.rollout.stages)
        return Move("full", self.stage, why) if last else Move("canary", self.stage + 1, why)

    def block(self) -> str | None:
        """Why the policy has to go; None where no loss is proved."""
        limit = math.log(1.0 / self.judge.alpha)
        weights = self.judge.weights()
        if combined_block(self.streams, weights) < limit:
            return None
        worst = max(weights, key=lambda name: self.streams[name].log_block + math.log(weights[name]))
        stream = self.streams[worst]
        return (
            f"{worst}: mean difference {stream.mean:+.4f} over {stream.count} conversations, margin {stream.margin:g}, "
            f"e-value {math.exp(min(700.0, stream.log_block)):.3g}"
        )

    def paused(self) -> str | None:
        """Why nothing may move on whatever the evidence says."""
        lost = [why for why in self.recent if why is not None]
        if len(lost) > self.judge.rollout.most_missing * max(20, len(self.recent)):
            return f"{len(lost)} of the last {len(self.recent)} comparisons are missing, lately: {lost[-1]}"
        return None

    def waiting(self) -> str | None:
        """What the next step still lacks; None where it may be taken."""
        rollout = self.judge.rollout
        if self.judge.shadow_only:
            return "the verdict allows shadows only"
        paused = self.paused()
        if paused is not None:
            return f"paused: {paused}"
        need = rollout.shadow_pairs if self.state == "shadow" else rollout.stages[self.stage].minimum_pairs
        have = self.pairs if self.state == "shadow" else min(self.pairs, self.arms)
        if have < need:
            return f"{have} of {need} pairs"
        if self.state == "canary" and self.slow is None:
            return "the exact arm's times are not known yet"
        asked = ["quality"]
        if self.state == "canary" and self.stage + 1 == len(rollout.stages):
            asked += GUARDS
        limit = math.log(1.0 / self.judge.alpha)
        unproved = [name for name in asked if self.streams[name].log_pass < limit]
        if unproved:
            stream = self.streams[unproved[0]]
            return f"{unproved[0]}: a loss of {stream.margin:g} is not ruled out yet"
        return None

    # -- inside -----------------------------------------------------------------------------------------------------

    def _reset(self) -> None:
        judge = self.judge
        self.streams = {"quality": Stream(judge.margin)}
        self.streams |= {f"quality:{name}": Stream(judge.rollout.slice_margin) for name in SLICES}
        self.streams |= {name: Stream(getattr(judge.rollout.limits, name)) for name in GUARDS}
        self.recent.clear()

    def _begin(self, data: Mapping[str, Any], at: float) -> None:
        self.verdict = data["verdict"]
        self.state, self.stage, self.since, self.why = "shadow", 0, at, "a verdict that was not seen before"
        self.pairs = self.arms = self.exposed = 0
        self.slow = None
        self._reset()

    def _pair(self, data: Mapping[str, Any]) -> None:
        self.pairs += 1
        self.streams["quality"].add(data["quality"])
        self.streams[f"quality:{data['slice']}"].add(data["quality"])
        self.recent.append(None)

    def _arms(self, differences: Mapping[str, float]) -> None:
        self.arms += 1
        for name in GUARDS:
            self.streams[name].add(-differences[name])  # more of it is worse

    def _move(self, move: Move, at: float) -> None:
        self.state, self.stage, self.why, self.since = move.state, move.stage, move.why, at
        self.pairs = self.arms = 0
