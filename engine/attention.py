"""The bridge: transformers calls these two, a Cache subclass and a registered attention function, and nothing of it is
patched. One :class:`Step` describes one forward pass over any number of rows.

The tokens of all rows are fed as one sequence ``[1, T]``: everything but attention works token by token, so no padding
is needed; position ids and the step say which token belongs where.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from kvgate.engine.by_token import attend_by_token
from kvgate.engine.rebase import Rebase
from kvgate.engine.store import PageStore
from kvgate.kernels import ops
from kvgate.kernels.torch_beside import beside
from kvgate.kernels.types import Attention

ATTENTION_NAME = "kvgate_paged"


class Attends(Protocol):
    """What a forward pass talks to: a :class:`Step`, or whoever wants to see what a model does."""

    position_T: Tensor

    def write(self, key: Tensor, value: Tensor, layer: int) -> None: ...
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer: int,
        scale: float,
        softcap: float | None,
        window: int | None,
    ) -> Tensor: ...


@dataclass(frozen=True)
class Rows:
    """A contiguous part of a step's rows that goes through one kernel call per layer. Which rows share a part depends
    on nothing that would change a row's result: ``single``, one token each; ``fresh``, one row on an empty cache,
    attended straight from its new keys.

    Shapes: R rows of this part, T their tokens, E exempt spans; ``tables``, ``live`` and ``counts`` carry all layers.
    """

    tables_LRHP: Tensor
    live_LRHP: Tensor
    counts_LRH: Tensor
    row_start_R1: Tensor
    exempt_RE2: Tensor | None
    sink_end_R: Tensor | None
    first_token: int
    last_token: int
    single: bool
    want_mass: bool
    fresh: bool


@dataclass
class Step:
    """One forward pass.

    Attributes:
        slots_LTH: int64 flat slot of every new token. ``position_T``, ``lower_T``: int32.
        parts: the rows, those whose attention mass is wanted apart from the others.
        observe: whether to keep all queries, and the logarithm of their softmax's denominator, layer by layer.
        beside_LHS: one row: int64 flat slots of everything it held before, the same number in each head; attention
            then reads them as contiguous tensors. None: through the tables.
        by_token: attend several tokens of a row as if they were fed one by one, to the bit.
        mass: per part, fp32 ``[R, H, P, S]`` per layer (``[1, H, T]`` of a fresh one), filled layer by layer.
    """

    store: PageStore
    slots_LTH: Tensor
    position_T: Tensor
    lower_T: Tensor | None
    parts: tuple[Rows, ...]
    native_windows: tuple[int | None, ...]
    layer_types: tuple[str, ...] | None
    rebase: Rebase | None
    observe: bool
    beside_LHS: Tensor | None = None
    by_token: bool = False
    mass: list[list[Tensor]] = field(default_factory=list)
    queries: list[Tensor] = field(default_factory=list)
    lse: list[Tensor] = field(default_factory=list)
    scale: float = 1.0
    softcap: float | None = None

    def write(self, key: Tensor, value: Tensor, layer: int) -> None:
        """New keys and values ``[1, H, T, D]`` of one layer into their slots."""
        self.store.append(_tokens_first(key), _tokens_first(value), self.position_T, self.slots_LTH[layer])

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer: int,
        scale: float,
        softcap: float | None,
        window: int | None,
    ) -> Tensor:
        """Attention output ``[1, T, Q, D]`` for queries ``[1, Q, T, D]``."""
        assert window == self.native_windows[layer], "the layer attends another window than when the model was loaded"
        q_TQD = _tokens_first(query)
        self.scale, self.softcap = scale, softcap
        if self.observe:
            self.queries.append(q_TQD)
        if self.beside_LHS is not None and softcap is None and self.native_windows[layer] is None:
            slots = self.beside_LHS[layer]
            k_old, v_old = (pool.view(-1, pool.shape[-1])[slots] for pool in (self.store.k, self.store.v))
            found = beside(q_TQD, k_old, v_old, _tokens_first(key), _tokens_first(value), scale=scale)
            self._note_lse([found])
            return found.out[None]
        results = [
            self._fresh(part, q_TQD, key, value, layer, scale, softcap)
            if part.fresh
            else self._paged(part, q_TQD, layer, scale, softcap)
            for part in self.parts
        ]
        self.mass.append([result.mass for result in results if result.mass is not None])
        self._note_lse(results)
        return torch.cat([result.out for result in results])[None]

    def _note_lse(self, results: list[Attention]) -> None:
        if self.observe:
            self.lse.append(torch.cat([result.lse for result in results]))

    def _fresh(
        self, part: Rows, q_TQD: Tensor, key: Tensor, value: Tensor, layer: int, scale: float, softcap: float | None
    ) -> Attention:
        tokens = slice(part.first_token, part.last_token)
        q, k, v = (each[tokens] for each in (q_TQD, _tokens_first(key), _tokens_first(value)))
        if part.first_token:  # a product may round differently where memory is aligned differently
            q, k, v = q.clone(), k.clone(), v.clone()
        found = ops.prefill_attention(
            q, k, v, scale=scale, softcap=softcap, native_window=self.native_windows[layer],
            want_mass=part.want_mass, backend=self.store.backend,
        )  # fmt: skip
        return Attention(found.out, found.lse, None if found.mass is None else found.mass[None])

    def _paged(self, part: Rows, q_TQD: Tensor, layer: int, scale: float, softcap: float | None) -> Attention:
        tokens = slice(part.first_token, part.last_token)
        q = q_TQD[tokens]
        q_sink = None
        if part.sink_end_R is not None and self.rebase is not None:
            q_sink = self.rebase(q_TQD, self.layer_types[layer] if self.layer_types else None)[tokens].contiguous()
        cache = (
            self.store.k, self.store.v, part.tables_LRHP[layer], part.live_LRHP[layer], part.counts_LRH[layer],
            self.store.positions, self.position_T[tokens],
        )  # fmt: skip
        lower = None if self.lower_T is None else self.lower_T[tokens]
        rules: dict[str, Any] = {
            "scale": scale, "softcap": softcap, "native_window": self.native_windows[layer],
            "exempt_RE2": part.exempt_RE2, "sink_end_R": part.sink_end_R, "want_mass": part.want_mass,
            "backend": self.store.backend,
        }  # fmt: skip
        if part.single:
            return ops.decode_attention(q, *cache, lower_R=lower, q_sink_RQD=q_sink, **rules)
        if self.by_token:
            return attend_by_token(
                q, cache[:2], cache[2:5], *cache[5:], part.row_start_R1, lower_T=lower, q_sink_TQD=q_sink, **rules
            )
        return ops.extend_attention(q, *cache, part.row_start_R1, lower_T=lower, q_sink_TQD=q_sink, **rules)


class PagedCache(Cache):  # type: ignore[misc]
    """What the model believes is its cache: writes go to pages; reads happen in the attention function."""

    def __init__(self, step: Attends) -> None:
        super().__init__(layers=[])
        self.step = step

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new keys and values, and hand them back as they are."""
        self.step.write(key_states, value_states, layer_idx)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0, *args: Any, **kwargs: Any) -> int:
        """Not known here: rows differ. Positions are always given explicitly."""
        return 0


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    kvgate_step: Attends | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The registered attention function: query ``[1, Q, T, D]``, key and value ``[1, H, T, D]`` of the new tokens.

    The positional parameters are those of transformers' own registered functions (``sdpa_attention_forward``), in their
    order: whoever wraps all of them hands ``dropout`` on as the sixth. Dropout is for training and has no effect here.
    """
    if kvgate_step is None:
        raise ValueError(
            "kvgate's attention was called outside the kvgate engine, or the model drops unknown arguments"
        )
    for name in ("s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(f"its attention adds {name} to the scores (learned sinks, position biases)")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return kvgate_step.attend(query, key, value, module.layer_idx, scale, softcap, sliding_window), None


def call_model(module: Any, ids: list[int], step: Attends, wanted: Tensor, device: torch.device) -> Tensor:
    """One forward pass over the tokens ``ids``; logits fp32 ``[len(wanted), V]`` at the places ``wanted``."""
    kind: Any = type(module)
    output = module(
        input_ids=torch.tensor([ids], device=device),
        position_ids=step.position_T[None].long(),
        use_cache=True,
        logits_to_keep=wanted.to(device),
        kvgate_step=step,
        **{_cache_argument(kind): PagedCache(step)},
    )
    logits: Tensor = output.logits[0].float()
    return logits


@cache
def _cache_argument(kind: type) -> str:
    """Name of the cache argument: transformers 5.24 renamed it."""
    return "cache" if "cache" in inspect.signature(kind.forward).parameters else "past_key_values"  # type: ignore[attr-defined]


def register() -> None:
    """Make the attention function known to transformers under :data:`ATTENTION_NAME`."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)


def _tokens_first(states: Tensor) -> Tensor:
    return states[0].transpose(0, 1).contiguous()
