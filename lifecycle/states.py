"""Request states, the legal moves between them, and what a caller asks for (docs/ARCHITECTURE.md)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class State(IntEnum):
    """Where a request is. The five from FINISHED on are ends: nothing leaves them."""

    QUEUED = 0
    ADMITTED = 1
    PREFILL = 2
    DECODE = 3
    PREEMPTED = 4
    SWAPPED = 5
    FINISHED = 6
    CANCELLED = 7
    TIMED_OUT = 8
    FAILED = 9
    REJECTED = 10

    @property
    def ended(self) -> bool:
        """True for the five end states."""
        return self >= State.FINISHED

    @property
    def running(self) -> bool:
        """True while the request holds device pages and is scheduled."""
        return State.ADMITTED <= self <= State.DECODE

    @property
    def waiting(self) -> bool:
        """True while the request stands in the queue: new, preempted or swapped out."""
        return self in (State.QUEUED, State.PREEMPTED, State.SWAPPED)


_ENDS = frozenset({State.FINISHED, State.CANCELLED, State.TIMED_OUT, State.FAILED})
_LEGAL: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.ADMITTED, State.REJECTED}) | (_ENDS - {State.FINISHED}),
    State.ADMITTED: frozenset({State.PREFILL, State.DECODE, State.PREEMPTED, State.SWAPPED})
    | (_ENDS - {State.FINISHED}),
    State.PREFILL: frozenset({State.DECODE, State.PREEMPTED, State.SWAPPED}) | _ENDS,
    State.DECODE: frozenset({State.PREEMPTED, State.SWAPPED}) | _ENDS,
    State.PREEMPTED: frozenset({State.ADMITTED}) | (_ENDS - {State.FINISHED}),
    State.SWAPPED: frozenset({State.ADMITTED, State.PREEMPTED}) | (_ENDS - {State.FINISHED}),
}


class IllegalTransitionError(AssertionError):
    """A move the state machine does not have: a bug in the caller, never clamped."""


def check_move(old: State, new: State, request: str) -> None:
    """Raise IllegalTransitionError unless ``old -> new`` is legal for ``request``."""
    if new not in _LEGAL.get(old, frozenset()):
        raise IllegalTransitionError(f"request {request}: no move from {old.name} to {new.name}")


@dataclass(frozen=True)
class Spec:
    """What a caller asks for.

    Attributes:
        id: unique among live requests.
        prompt_len: prompt tokens, at least 1.
        max_tokens: most tokens it may generate, at least 1.
        tenant: name of a configured tenant (or any, where the configuration has a default tenant).
        priority: lower is more urgent; at least 0.
        deadline: clock time after which the answer is worth nothing; None for never.
        model_version: the model that serves it; retiring that version ends the request.
    """

    id: str
    prompt_len: int
    max_tokens: int
    tenant: str = "default"
    priority: int = 0
    deadline: float | None = None
    model_version: str = ""

    def __post_init__(self) -> None:
        for name, low in (("prompt_len", 1), ("max_tokens", 1), ("priority", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ValueError(f"request {self.id}: {name} is {value!r}, needs an integer of at least {low}")
