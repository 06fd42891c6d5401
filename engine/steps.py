"""Builds a :class:`Step` from sequences and planned slots: the tensors the kernels read. Touches no page."""

from __future__ import annotations

from collections.abc import Sequence as Several
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvgate.compressors.policy import Bounds
from kvgate.engine.attention import Rows, Step
from kvgate.engine.rebase import Rebase, find_rotary
from kvgate.engine.sequence import Sequence
from kvgate.engine.store import PageStore
from kvgate.lifecycle.tables import Tables


class Feed(IntEnum):
    """How a row's tokens come: one to a cache, several to a cache, or onto nothing."""

    SINGLE = 0
    SEVERAL = 1
    FRESH = 2


class Kind(NamedTuple):
    """Rows of a kind stand together in a step, in this order. A row's kind never depends on the other rows."""

    want_mass: bool
    how: Feed


def kind_of(row: Sequence, count: int, *, empty: bool, by_token: bool) -> Kind:
    """``count`` new tokens for ``row``, whose table is ``empty``. Bounds hold inside a first chunk too, so a row that
    has them reads its pages; so do all rows where tokens are attended ``by_token``.
    """
    bounded = row.policy is not None and row.policy.bounds(row.protected) is not None
    fresh = empty and row.length == 0 and not bounded and not by_token
    return Kind(row.needs("mass"), Feed.FRESH if fresh else Feed.SINGLE if count == 1 else Feed.SEVERAL)


def _runs(kinds: Several[Kind]) -> list[tuple[int, int]]:
    """Ranges of rows of one kind; a fresh row stands alone."""
    found: list[tuple[int, int]] = []
    for index, kind in enumerate(kinds):
        if found and kind == kinds[index - 1] and kind.how != Feed.FRESH:
            found[-1] = found[-1][0], index + 1
        else:
            found.append((index, index + 1))
    return found


class StepBuilder:
    """Knows the model's shape and where the tensors are."""

    def __init__(self, module: Any, tables: Tables, store: PageStore, native_windows: tuple[int | None, ...]) -> None:
        self._module = module
        self._tables = tables
        self._store = store
        self._native = native_windows
        kinds = getattr(module.config.get_text_config(), "layer_types", None)
        self._layer_types = tuple(kinds) if kinds else None

    def build(
        self,
        rows: Several[Sequence],
        counts: Several[int],
        slots: NDArray[np.int64],
        kinds: Several[Kind],
        *,
        observe: bool = False,
    ) -> Step:
        """``rows`` in the order of their ``kinds``; ``counts`` new tokens each; ``slots`` ``[T, L, H]``.

        The tables already hold the new tokens; the sequences' lengths do not count them yet. ``observe``: keep queries
        even if no row asks for them.
        """
        positions = [np.arange(row.length, row.length + count) for row, count in zip(rows, counts, strict=True)]
        bounds = [row.policy.bounds(row.protected) if row.policy else None for row in rows]
        lower = [
            np.zeros_like(where) if bound is None else bound.lower(where)
            for where, bound in zip(positions, bounds, strict=True)
        ]
        ends = np.concatenate([[0], np.cumsum(counts)])
        parts = [self._part(rows[a:b], bounds[a:b], ends[a : b + 1], kinds[a]) for a, b in _runs(kinds)]
        return Step(
            store=self._store,
            slots_LTH=self._tensor(np.ascontiguousarray(np.moveaxis(slots, 1, 0))),
            position_T=self._tensor(np.concatenate(positions).astype(np.int32)),
            lower_T=self._tensor(np.concatenate(lower).astype(np.int32)) if any(bounds) else None,
            parts=tuple(parts),
            native_windows=self._native,
            layer_types=self._layer_types,
            rebase=self._rebase(bounds, lower),
            observe=observe or any(row.observed for row in rows),
        )

    def _part(
        self,
        rows: Several[Sequence],
        bounds: Several[Bounds | None],
        ends: NDArray[np.int64],
        kind: Kind,
    ) -> Rows:
        ids = [row.id for row in rows]
        width = self._tables.width(ids)
        sink_ends = [bound.rebased_sinks if bound else 0 for bound in bounds]
        return Rows(
            tables_LRHP=self._layers_first(self._tables.pages[ids, :, :, :width]),
            live_LRHP=self._layers_first(self._tables.live[ids, :, :, :width].view(np.int32)),
            counts_LRH=self._layers_first(self._tables.counts[ids]),
            row_start_R1=torch.from_numpy((ends - ends[0]).astype(np.int32)),
            exempt_RE2=self._exempt(bounds),
            sink_end_R=self._tensor(np.asarray(sink_ends, np.int32)) if any(sink_ends) else None,
            first_token=int(ends[0]),
            last_token=int(ends[-1]),
            single=kind.how == Feed.SINGLE,
            want_mass=kind.want_mass,
            fresh=kind.how == Feed.FRESH,
        )

    def _exempt(self, bounds: Several[Bounds | None]) -> Tensor | None:
        most = max(len(bound.exempt) if bound else 0 for bound in bounds)
        if most == 0:
            return None
        spans = np.zeros((len(bounds), most, 2), np.int32)
        for row, bound in enumerate(bounds):
            for index, span in enumerate(bound.exempt if bound else ()):
                spans[row, index] = span.start, span.end
        return self._tensor(spans)

    def _rebase(self, bounds: Several[Bounds | None], lower: Several[NDArray[np.int64]]) -> Rebase | None:
        ends = [bound.rebased_sinks if bound else 0 for bound in bounds]
        if not any(ends):
            return None
        shift = [np.maximum(low - end, 0) if end else np.zeros_like(low) for low, end in zip(lower, ends, strict=True)]
        return Rebase(find_rotary(self._module), self._tensor(np.concatenate(shift)), self._store.k[:1, 0])

    def _layers_first(self, array: NDArray[Any]) -> Tensor:
        return self._tensor(np.ascontiguousarray(np.moveaxis(array, 1, 0)))

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self._store.device)


def places(order: Several[int], sizes: Several[int]) -> Tensor:
    """Where the tokens of the caller's rows stand in a step ordered by ``order`` with ``sizes`` tokens a row."""
    starts = np.concatenate([[0], np.cumsum(sizes)])
    at = np.argsort(order)
    return torch.from_numpy(np.concatenate([np.arange(starts[i], starts[i + 1]) for i in at]))
