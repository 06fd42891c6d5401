"""What a policy may look at and what it answers.

Axis legend: L layers, H kv heads, Q query heads, S slots (page_size x logical pages of the sequence), D head_dim,
W observed queries. Slots come in no particular order: ``positions`` says which token a slot holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

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
class LastQueries:
    """Need: the last ``count`` queries."""

    count: int

    def __str__(self) -> str:
        return f"the last {self.count} queries"


@dataclass(frozen=True)
class QueryMoments:
    """Need: mean and covariance of all queries but those of the first ``skip`` tokens, before rotation."""

    skip: int = 0

    def __str__(self) -> str:
        return f"query moments beyond token {self.skip}"


Need = Literal["mass", "keys", "values", "probe"] | LastQueries | QueryMoments


def missing(wanted: frozenset[Need], collected: frozenset[Need]) -> list[str]:
    """What of ``wanted`` cannot be made up for, since it is gathered while tokens are fed and was not ``collected``."""
    window = max((need.count for need in collected if isinstance(need, LastQueries)), default=0)
    late = {"keys", "values"}  # they lie in the pages
    return sorted(
        str(need) for need in wanted - collected - late if not (isinstance(need, LastQueries) and need.count <= window)
    )


@dataclass(frozen=True)
class Moments:
    """Of the queries before rotation: ``mean`` fp32 ``[L, Q, D]``, ``covariance`` fp32 ``[L, Q, D, D]``, divided by the
    number of queries."""

    mean: Tensor
    covariance: Tensor


@dataclass(frozen=True)
class Observed:
    """What a probe showed.

    Attributes:
        queries: ``[L, Q, W, D]`` in the model dtype, rotated, of every probe token.
        lse: fp32 ``[L, Q, W]``, log of the sum of exp(logit) over everything each query attended: the context and the
            probe's own tokens up to it. exp(logit - lse) is its attention probability.
        first: position of the first probe token.
    """

    queries: Tensor
    lse: Tensor
    first: int


@dataclass(frozen=True)
class Model:
    """Constants of the model that scores may need.

    Attributes:
        scale: logits are ``scale * q . k``, then ``softcap * tanh(logit / softcap)`` if there is a ``softcap``.
        windows: per layer, the sliding window the model declares, None for full attention.
        encode: text to token ids without special tokens. ValueError if the model came without a tokenizer.
        turn: ``turn(x, by, layer)``: rotary embedding of that layer on fp32 ``x`` ``[..., T, D]`` by int64 ``by``
            ``[T]`` positions more (negative: back). ValueError if the model's rotation is not known.
    """

    scale: float
    softcap: float | None
    windows: tuple[int | None, ...]
    encode: Callable[[str], list[int]]
    turn: Callable[[Tensor, Tensor, int], Tensor]


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
            policy ``needs`` LastQueries(W). Fewer where there were fewer tokens.
        moments: of the queries; present if the policy ``needs`` QueryMoments.
        keys: call for the rotated keys ``[L, H, S, D]``; gathered from pages only when called. Present if the policy
            ``needs`` "keys".
        values: the same for the values.
        tokens, probe: the token ids seen so far, and ``probe(ids)``, which runs extra tokens over the cached context
            and tells what they attended. They never become context; their number is recorded. Present if the policy
            ``needs`` "probe".
        model: constants of the model; None where nobody supplied them.
        exact_slots: slots that the exact run holds at this length, summed over layers and kv heads (fewer than
            ``length`` a head where layers declare windows).
        page_size: slots of a page, the unit in which memory is freed; 1 where that does not matter.
        state: whatever this policy returned with its last ``Keep`` for this sequence; None the first time.
    """

    positions: Tensor
    live: Tensor
    length: int
    protected: tuple[Span, ...] = ()
    mass: Tensor | None = None
    queries: Tensor | None = None
    moments: Moments | None = None
    keys: Callable[[], Tensor] | None = None
    values: Callable[[], Tensor] | None = None
    tokens: Sequence[int] = ()
    probe: Callable[[Sequence[int]], Observed] | None = None
    model: Model | None = None
    exact_slots: int | None = None
    page_size: int = 1
    state: Any = None

    @property
    def age(self) -> Tensor:
        """int32 ``[L, H, S]``: tokens since each slot's token, 1 for the newest."""
        return self.length - self.positions


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
