"""Live requests as parallel arrays, so that a scheduling round costs a few array operations."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvgate.lifecycle.states import Spec, State, check_move

_FIELDS: dict[str, type[np.generic]] = {
    "state": np.int8,
    "account": np.int32,
    "priority": np.int32,
    "rank": np.int32,
    "seq": np.int64,
    "prompt": np.int32,
    "bound": np.int32,
    "generated": np.int32,
    "computed": np.int32,
    "high": np.int32,
    "blocks": np.int32,
    "preemptions": np.int32,
    "bypassed": np.int32,
    "waited": np.int64,
    "since": np.int64,
    "deadline": np.float64,
    "arrived": np.float64,
    "ticket": np.int64,
    "cap": np.int32,
}


class Requests:
    """One slot per live request; slots of ended requests are used again.

    Attributes (arrays over slots):
        state, account, priority: see states.py; ``account`` is the tenant's index.
        rank: priority level it was last admitted at (aged ones rank higher, that is lower numbers).
        seq: order of arrival.
        prompt, bound, generated: tokens of the prompt, max_tokens, tokens generated.
        computed: tokens whose KV is held; high: the most that ever was.
        blocks: blocks held on the device.
        preemptions, bypassed: times it was a victim; requests that started before it while it was head.
        waited: rounds spent waiting in total; since: round in which it began to wait or run.
        deadline, arrived: clock times. ticket: its last launch. cap: most blocks after degrading, 0 for none.
    """

    state: NDArray[np.int8]
    account: NDArray[np.int32]
    priority: NDArray[np.int32]
    rank: NDArray[np.int32]
    seq: NDArray[np.int64]
    prompt: NDArray[np.int32]
    bound: NDArray[np.int32]
    generated: NDArray[np.int32]
    computed: NDArray[np.int32]
    high: NDArray[np.int32]
    blocks: NDArray[np.int32]
    preemptions: NDArray[np.int32]
    bypassed: NDArray[np.int32]
    waited: NDArray[np.int64]
    since: NDArray[np.int64]
    deadline: NDArray[np.float64]
    arrived: NDArray[np.float64]
    ticket: NDArray[np.int64]
    cap: NDArray[np.int32]

    def __init__(self, slots: int = 64) -> None:
        for name, kind in _FIELDS.items():
            setattr(self, name, np.zeros(slots, kind))
        self.deadline[:] = np.inf
        self.specs: list[Spec | None] = [None] * slots
        self.index: dict[str, int] = {}
        self._spare = list(range(slots - 1, -1, -1))
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self.index)

    def add(self, spec: Spec, account: int, priority: int, now: float, round_: int) -> int:
        """A slot in state QUEUED for a new request. Raises ValueError if its id is live already."""
        if spec.id in self.index:
            raise ValueError(f"request {spec.id}: this id is live already")
        if not self._spare:
            self._double()
        slot = self._spare.pop()
        for name in _FIELDS:
            getattr(self, name)[slot] = 0
        self.account[slot], self.priority[slot], self.rank[slot] = account, priority, priority
        self.prompt[slot], self.bound[slot] = spec.prompt_len, spec.max_tokens
        self.deadline[slot] = np.inf if spec.deadline is None else spec.deadline
        self.arrived[slot], self.since[slot] = now, round_
        self.seq[slot] = self._arrivals
        self._arrivals += 1
        self.specs[slot] = spec
        self.index[spec.id] = slot
        return slot

    def move(self, slot: int, new: State) -> None:
        """Change state; raises IllegalTransitionError where the state machine has no such move."""
        check_move(State(self.state[slot]), new, self.spec(slot).id)
        self.state[slot] = new

    def remove(self, slot: int) -> None:
        """Give the slot of an ended request back."""
        assert State(self.state[slot]).ended, "only ended requests leave the table"
        del self.index[self.spec(slot).id]
        self.deadline[slot] = np.inf
        self.specs[slot] = None
        self._spare.append(slot)

    def spec(self, slot: int) -> Spec:
        """What the request in ``slot`` asked for."""
        found = self.specs[slot]
        assert found is not None, f"slot {slot} is empty"
        return found

    def known(self, slots: NDArray[np.int64]) -> NDArray[np.int32]:
        """Tokens whose KV the next output token needs: prompt and generated."""
        total: NDArray[np.int32] = self.prompt[slots] + self.generated[slots]
        return total

    def late(self, now: float) -> list[str]:
        """Ids of live requests whose deadline has passed."""
        return [self.spec(int(slot)).id for slot in np.flatnonzero(self.deadline <= now)]

    def _double(self) -> None:
        size = len(self.specs)
        for name in _FIELDS:
            setattr(self, name, np.concatenate([getattr(self, name), np.zeros_like(getattr(self, name))]))
        self.deadline[size:] = np.inf
        self.specs += [None] * size
        self._spare = list(range(2 * size - 1, size - 1, -1))
