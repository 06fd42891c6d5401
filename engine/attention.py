"""The bridge: transformers calls these two, a Cache subclass and a registered attention function, and nothing of it is
patched. One :class:`Step` describes one forward pass over any number of rows.

The tokens of all rows are fed as one sequence ``[1, T]``: everything but attention works token by token, so no padding
is needed; position ids and the step say which token belongs where.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from kvgate.engine.rebase import Rebase
from kvgate.engine.store import PageStore
from kvgate.kernels import ops
from kvgate.kernels.types import Attention

ATTENTION_NAME = "kvgate_paged"


@dataclass(frozen=True)
class Rows:
    """A contiguous part of a step's rows that goes through one kernel call per layer.

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


@dataclass
class Step:
    """One forward pass.

    Attributes:
        slots_LTH: int64 flat slot of every new token. ``position_T``, ``lower_T``: int32.
        parts: the rows, those whose attention mass is wanted apart from the others.
        fresh: one row on an empty cache, attended straight from the new keys.
        observe: how many of each row's last queries to keep in ``queries``.
        mass: per part, fp32 ``[R, H, P, S]`` per layer (``[1, H, T]`` when fresh), filled layer by layer.
    """

    store: PageStore
    slots_LTH: Tensor
    position_T: Tensor
    lower_T: Tensor | None
    parts: tuple[Rows, ...]
    native_windows: tuple[int | None, ...]
    layer_types: tuple[str, ...] | None
    fresh: bool
    rebase: Rebase | None
    observe: bool
    mass: list[list[Tensor]] = field(default_factory=list)
    queries: list[Tensor] = field(default_factory=list)

    def write(self, key: Tensor, value: Tensor, layer: int) -> None:
        """New keys and values ``[1, H, T, D]`` of one layer into their slots."""
        self.store.append(_tokens_first(key), _tokens_first(value), self.position_T, self.slots_LTH[layer])

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, layer: int, scale: float, softcap: float | None
    ) -> Tensor:
        """Attention output ``[1, T, Q, D]`` for queries ``[1, Q, T, D]``."""
        q_TQD = _tokens_first(query)
        if self.observe:
            self.queries.append(q_TQD)
        if self.fresh:
            part = self.parts[0]
            found = ops.prefill_attention(
                q_TQD, _tokens_first(key), _tokens_first(value), scale=scale, softcap=softcap,
                native_window=self.native_windows[layer], want_mass=part.want_mass, backend=self.store.backend,
            )  # fmt: skip
            self.mass.append([] if found.mass is None else [found.mass[None]])
            return found.out[None]
        results = [self._paged(part, q_TQD, layer, scale, softcap) for part in self.parts]
        self.mass.append([result.mass for result in results if result.mass is not None])
        return torch.cat([result.out for result in results])[None]

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
        return ops.extend_attention(q, *cache, part.row_start_R1, lower_T=lower, q_sink_TQD=q_sink, **rules)


class PagedCache(Cache):  # type: ignore[misc]
    """What the model believes is its cache: writes go to pages; reads happen in the attention function."""

    def __init__(self, step: Step) -> None:
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
    scaling: float | None = None,
    softcap: float | None = None,
    kvgate_step: Step | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The registered attention function: query ``[1, Q, T, D]``, key and value ``[1, H, T, D]`` of the new tokens."""
    if kvgate_step is None:
        raise ValueError(
            "kvgate's attention was called outside the kvgate engine, or the model drops unknown arguments"
        )
    declared = kvgate_step.native_windows[module.layer_idx]
    assert sliding_window is None or declared == sliding_window, "the model attends another window than its config says"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return kvgate_step.attend(query, key, value, module.layer_idx, scale, softcap), None


def register() -> None:
    """Make the attention function known to transformers under :data:`ATTENTION_NAME`."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)


def _tokens_first(states: Tensor) -> Tensor:
    return states[0].transpose(0, 1).contiguous()
