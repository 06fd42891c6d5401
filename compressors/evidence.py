"""What a policy may look at and what it answers.

Axis legend: L layers, H kv heads, Q query heads, S slots (page_size x logical pages of the sequence), D head_dim,
W observed queries. Slots come in no particular order: ``positions`` says which token a slot holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Span:
    """Half-open range ``[start, end)`` of token positions."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise ValueError(f"span [{self.start}, {self.end}): needs 0 <= start < end")


@dataclass(frozen=True)
class Evidence:
    """Everything a policy may read when it decides. Read-only.

    A policy never sees the question before it is asked, the answer, or where a needle stands.

    Attributes:
        positions: int32 ``[L, H, S]``, original token index of each slot. Meaningless where ``live`` is False.
        live: bool ``[L, H, S]``, slots the sequence still attends.
        length: tokens seen so far, evicted ones included; the next token gets this position.
        protected: token ranges that stay live whatever the scores.
        mass: fp32 ``[L, H, S]``, attention probability summed over all queries so far and over the query heads of
            the kv head; present if the policy ``needs`` "mass".
        queries: ``[L, Q, W, D]`` in the model dtype, the last W queries (rotated), oldest first; present if the
            policy ``needs`` "queries".
        keys: call for the rotated keys ``[L, H, S, D]``; gathered from pages only when called. Present if the policy
            ``needs`` "keys".
        values: the same for the values.
        state: whatever this policy returned with its last ``Keep`` for this sequence; None the first time.
    """

    positions: Tensor
    live: Tensor
    length: int
    protected: tuple[Span, ...] = ()
    mass: Tensor | None = None
    queries: Tensor | None = None
    keys: Callable[[], Tensor] | None = None
    values: Callable[[], Tensor] | None = None
    state: Any = None


@dataclass(frozen=True)
class Keep:
    """A policy's answer.

    Attributes:
        slots: bool ``[L, H, S]``, the slots that stay live. A subset of ``Evidence.live``.
        state: carried to the next decision on the same sequence.
    """

    slots: Tensor
    state: Any = field(default=None, compare=False)

    @staticmethod
    def all(evidence: Evidence) -> Keep:
        """The exact run's answer."""
        return Keep(evidence.live)


def in_spans(positions: Tensor, spans: tuple[Span, ...]) -> Tensor:
    """Bool tensor of ``positions``' shape: which positions lie in any of ``spans``."""
    inside = torch.zeros_like(positions, dtype=torch.bool)
    for span in spans:
        inside |= (positions >= span.start) & (positions < span.end)
    return inside
