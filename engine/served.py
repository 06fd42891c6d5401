"""One request as its caller sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvgate.compressors.evidence import Need
from kvgate.compressors.policy import Policy
from kvgate.engine.sink import Greedy, Sink
from kvgate.lifecycle.states import Spec, State


@dataclass(frozen=True)
class Beside:
    """A second row that runs beside a request from the end of its prompt and is compared with it.

    Attributes:
        policy: the second row's; None for an exact row beside one under a policy.
        answer: whether it also writes an answer of its own, from the first token that it would have chosen otherwise.
    """

    policy: Policy | None
    answer: bool = False


@dataclass
class Served:
    """A request and what became of it.

    Attributes:
        spec: what was asked. prompt: its token ids. stops: ids that end it. adapter: part of the prefix namespace.
        tokens: generated so far, the stop id excluded. fed: all sampled ids, the stop id included.
        state: where it is or how it ended.
        hit: tokens that came from the prefix cache at its first start. rehit: at later ones, after a preemption: own
            work found again, no hit.
        degraded: the policy that the server put it under to make room, and None where it stayed as it was asked for.
        sink: chooses its tokens. policy: what its row lives under once all of the prompt but the last token is in, as
            in the protocol whole_prompt; None for exact. beside: a row to compare it with.
        switched: the policy has taken over. error: why it failed.
    """

    spec: Spec
    prompt: tuple[int, ...]
    stops: frozenset[int] = frozenset()
    adapter: str = ""
    tokens: list[int] = field(default_factory=list)
    fed: list[int] = field(default_factory=list)
    state: State = State.QUEUED
    hit: int = 0
    rehit: int = 0
    starts: int = 0
    degraded: Policy | None = None
    sink: Sink = field(default_factory=Greedy)
    policy: Policy | None = None
    beside: Beside | None = None
    switched: bool = False
    error: Exception | None = None

    @property
    def needs(self) -> frozenset[Need]:
        """Evidence to collect while its prompt is computed."""
        policies = (self.policy, self.beside.policy if self.beside else None)
        return frozenset[Need]().union(*(policy.needs for policy in policies if policy is not None))

    @property
    def from_scratch(self) -> bool:
        """Whether every prompt token has to be computed: evidence or logits of cached ones are not known."""
        return bool(self.needs - {"keys", "values"}) or self.sink.reads_prompt

    def looked_up(self, tokens: int) -> None:
        """It starts with ``tokens`` tokens out of the prefix cache."""
        if self.starts == 0:
            self.hit = tokens
        else:
            self.rehit += tokens
        self.starts += 1

    def part(self, first: int, count: int) -> list[int]:
        """``count`` token ids from position ``first`` on, without touching the rest."""
        prompt = len(self.prompt)
        inside = self.prompt[first : first + count]
        return [*inside, *self.fed[max(0, first - prompt) : max(0, first + count - prompt)]]

    def known(self) -> NDArray[np.int64]:
        """Token ids known so far: prompt and sampled."""
        return np.array([*self.prompt, *self.fed], np.int64)
