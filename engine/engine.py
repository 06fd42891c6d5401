"""The engine: exact prefill into pages, forks, eviction by a policy, and steps over any number of rows at once."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvgate.compressors.contract import check_keep
from kvgate.compressors.evidence import Evidence, Span
from kvgate.compressors.policy import Need, Policy
from kvgate.engine.attention import Step, call_model
from kvgate.engine.gathering import gather_evidence
from kvgate.engine.mass import clear_mass, fit_mass, move_mass
from kvgate.engine.models import LoadedModel
from kvgate.engine.refusals import refuse_policy
from kvgate.engine.sequence import Sequence
from kvgate.engine.steps import StepBuilder, places
from kvgate.engine.store import PageStore
from kvgate.kernels.types import Backend
from kvgate.lifecycle.pool import OutOfPages, PageError, PagePool
from kvgate.lifecycle.tables import Geometry, Moved, Tables

DEFAULT_PAGE_SIZE = 16


class Engine:
    """Owns one model's pages.

    Args:
        loaded: from :func:`kvgate.engine.models.load_model`.
        pages: pool size. ``page_size``: token slots of a page.
        prefill_chunk: most tokens of one prefill step.
        backend: force "torch" or "triton".
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        pages: int,
        page_size: int = DEFAULT_PAGE_SIZE,
        prefill_chunk: int = 2048,
        backend: Backend | None = None,
    ) -> None:
        self.info = loaded.info
        self._module = loaded.module
        self._chunk = prefill_chunk
        geometry = Geometry(self.info.layers, self.info.kv_heads, page_size)
        self.tables = Tables(PagePool(pages), geometry)
        parameter = next(loaded.module.parameters())
        self.store = PageStore(self.tables, self.info.head_dim, parameter.dtype, parameter.device, backend)
        self._builder = StepBuilder(loaded.module, self.tables, self.store, self.info.native_windows)

    # -- sequences ------------------------------------------------------------------------------------------------

    def prefill(
        self, tokens: Several[int], *, needs: frozenset[Need] = frozenset(), protected: tuple[Span, ...] = ()
    ) -> tuple[Sequence, Tensor]:
        """An exact sequence over ``tokens`` and the logits fp32 ``[V]`` after the last one.

        ``needs``: evidence to collect for the policies that will be applied to forks of it.
        """
        if not tokens:
            raise ValueError("prompt: has no tokens")
        if len(tokens) > self.info.max_positions:
            raise ValueError(
                f"prompt: {len(tokens)} tokens, but the model has {self.info.max_positions} positions; shorten the item"
            )
        row = self.begin(needs=needs, protected=protected)
        try:
            for first in range(0, len(tokens), self._chunk):
                logits = self.extend([row], [tokens[first : first + self._chunk]])
        except BaseException:
            self.release(row)
            raise
        return row, logits[0]

    def begin(self, *, needs: frozenset[Need] = frozenset(), protected: tuple[Span, ...] = ()) -> Sequence:
        """An exact sequence without any tokens yet; see :meth:`prefill`."""
        return Sequence(self.tables.create(), protected=protected, collect=needs)

    def fork(self, parent: Sequence, policy: Policy | None = None) -> Sequence:
        """A row that shares ``parent``'s pages, under ``policy`` from now on (None: the parent's own, if any).

        Evidence that the row's policy does not need is left behind. ValueError if the policy cannot work on
        ``parent``: evidence that was not collected, protected spans that fill its budget, positions it cannot rebase.
        """
        self._require_held(parent)
        if policy is not None and policy != parent.policy:
            refuse_policy(policy, parent, self.info)
        child = replace(parent, id=self.tables.fork(parent.id))
        if policy is not None and policy != parent.policy:
            child.policy, child.state = policy, None
        child.collect = child.policy.needs if child.policy else frozenset()
        child.queries = parent.queries if child.needs("queries") else None
        child.mass = parent.mass.clone() if parent.mass is not None and child.needs("mass") else None
        return child

    def release(self, row: Sequence) -> None:
        """Give the row's pages back. Releasing twice raises PageError, also when its id is in use again."""
        self._require_held(row)
        self.tables.release(row.id)
        row.released = True
        row.mass = row.queries = None

    def resident_pages(self, row: Sequence) -> int:
        """Pages the row references, as if it ran alone."""
        return int(self.tables.counts[row.id].sum())

    def live_tokens(self, row: Sequence) -> int:
        """Live slots, summed over layers and kv heads."""
        return int(self.tables.live_counts(row.id).sum())

    # -- steps ----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def extend(
        self,
        rows: Several[Sequence],
        tokens: Several[Several[int]],
        *,
        every: bool = False,
        failures: dict[int, Exception] | None = None,
    ) -> Tensor:
        """Feed new tokens to each row in one forward pass, then let each row's policy evict.

        Returns fp32 logits ``[R, V]`` after each row's last token, or with ``every`` ``[T, V]`` after every token.
        If the forward pass fails, the rows are what they were before. A policy that fails raises; where ``failures``
        is given, it is noted there by the row's index instead, and the other rows go on.
        """
        for row in rows:
            self._require_held(row)
        counts = [len(part) for part in tokens]
        self._refuse_overflow(rows, counts)
        order = sorted(range(len(rows)), key=lambda index: rows[index].needs("mass"))
        ordered = [rows[index] for index in order]
        sizes = [counts[index] for index in order]
        ids = [token for index in order for token in tokens[index]]
        fresh = len(rows) == 1 and rows[0].length == 0 and self.tables.counts[rows[0].id].max() == 0
        placed = self.tables.append([row.id for row in ordered], sizes, [row.length for row in ordered])
        ends = np.cumsum(sizes)
        wanted = torch.arange(ends[-1]) if every else torch.from_numpy(ends - 1)
        try:
            self.store.carry_out(placed)
            step = self._builder.build(ordered, sizes, placed.slots, fresh=fresh)
            logits = self._forward(ids, step, wanted)
        except BaseException:
            self._take_back(ordered, placed.slots)
            raise
        gather_evidence(ordered, sizes, step, [self._slots(row) for row in ordered])
        for index in order:
            try:
                self.settle(rows[index])
            except Exception as error:
                if failures is None:
                    raise
                failures[index] = error
        return logits[places(order, sizes) if every else torch.tensor(np.argsort(order))]

    def switch(self, row: Sequence, policy: Policy | None) -> None:
        """From now on ``row`` lives under ``policy``, or stays exact (None) and collects no more evidence.

        ValueError as for :meth:`fork`. What the policy drops is freed at once, and what it keeps is gathered.
        """
        self._require_held(row)
        if policy is not None:
            refuse_policy(policy, row, self.info)
        row.policy, row.state = policy, None
        row.collect = policy.needs if policy else frozenset()
        row.mass = row.mass if row.needs("mass") else None
        row.queries = row.queries if row.needs("queries") else None
        evicted = row.evicted
        self.settle(row)
        if policy is not None and row.evicted > evicted:
            self.compact(row)

    def settle(self, row: Sequence) -> None:
        """Free what the model itself no longer attends, then what the row's policy drops."""
        self._drop_native(row)
        if row.policy is None or int(self.tables.live_counts(row.id).max()) <= row.policy.budget:
            return
        self.evict(row)

    @torch.inference_mode()
    def evict(self, row: Sequence, *, compact: bool = False) -> None:
        """Ask the row's policy what stays, and free the rest. ``compact`` gathers what is left into fewer pages."""
        self._require_held(row)
        assert row.policy is not None, "the exact run has no policy to ask"
        evidence = self.evidence(row)
        keep = row.policy.decide(evidence)
        check_keep(row.policy, evidence, keep)
        gone = int((evidence.live & ~keep.slots).sum())
        self._retain(row, keep.slots.cpu().numpy())
        row.state = keep.state
        row.evicted += gone
        row.tainted |= gone > 0
        if compact:
            self.compact(row)

    @torch.inference_mode()
    def compact(self, row: Sequence) -> None:
        """Gather the live slots of partly live pages, as far as the pool has room for the copies."""
        try:
            self._follow(row, self.tables.compact(row.id))
        except OutOfPages:
            return  # held slots are reported as held

    def evidence(self, row: Sequence) -> Evidence:
        """What the row's policy may look at."""
        width = self.tables.width([row.id])
        pages = self.tables.pages[row.id, :, :, :width]
        positions = self.tables.positions[pages].reshape(*pages.shape[:2], -1)
        return Evidence(
            positions=torch.from_numpy(positions).to(self.store.device),
            live=torch.from_numpy(self.tables.live_slots(row.id)).to(self.store.device),
            length=row.length,
            protected=row.protected,
            mass=row.mass[..., : positions.shape[-1]] if row.mass is not None else None,
            queries=row.queries,
            keys=(lambda: self.store.gather(self.store.k, pages)) if row.needs("keys") else None,
            values=(lambda: self.store.gather(self.store.v, pages)) if row.needs("values") else None,
            state=row.state,
        )

    # -- internals ------------------------------------------------------------------------------------------------

    def _forward(self, ids: list[int], step: Step, wanted: Tensor) -> Tensor:
        return call_model(self._module, ids, step, wanted, self.store.device)

    def _follow(self, row: Sequence, moved: Moved | None) -> None:
        """Do a plan's copies and let the row's mass move with its slots."""
        if moved is None:
            return
        self.store.carry_out(moved)
        move_mass(row, moved.source, self.tables.live_slots(row.id))

    def _drop_native(self, row: Sequence) -> None:
        """Lossless: slots behind a layer's declared window will never be attended again."""
        windows = self.info.native_windows
        if not any(window and row.length >= window for window in windows):
            return
        live = self.tables.live_slots(row.id)
        pages = self.tables.pages[row.id, :, :, : live.shape[-1] // self.tables.geometry.page_size]
        positions = self.tables.positions[pages].reshape(live.shape)
        reach = np.array([row.length - window + 1 if window else 0 for window in windows])
        keep: NDArray[np.bool_] = live & (positions >= reach[:, None, None])
        if keep.sum() < live.sum():
            self._retain(row, keep)

    def _take_back(self, rows: Several[Sequence], slots: NDArray[np.int64]) -> None:
        """Undo an append whose tokens never arrived: the flat ``slots`` it handed out die again."""
        size = self.tables.geometry.page_size
        for row in rows:
            live = self.tables.live_slots(row.id)
            pages = self.tables.pages[row.id, :, :, : live.shape[-1] // size, None].astype(np.int64)
            flat = (pages * size + np.arange(size)).reshape(live.shape)
            fit_mass(row, live.shape[-1])
            self._retain(row, live & ~np.isin(flat, slots))

    def _retain(self, row: Sequence, keep: NDArray[np.bool_]) -> None:
        """``keep`` ``[L, H, slots]``, a subset of the live slots; the row's mass follows."""
        moved = self.tables.retain(row.id, keep)
        clear_mass(row, keep)
        self._follow(row, moved)

    def _slots(self, row: Sequence) -> int:
        return self.tables.width([row.id]) * self.tables.geometry.page_size

    def _require_held(self, row: Sequence) -> None:
        if row.released:
            raise PageError(f"sequence {row.id} was released")

    def _refuse_overflow(self, rows: Several[Sequence], counts: Several[int]) -> None:
        for row, count in zip(rows, counts, strict=True):
            if count == 0:
                raise ValueError("a row has no new tokens")
            if row.length + count > self.info.max_positions:
                raise ValueError(
                    f"sequence of {row.length + count} tokens: the model has {self.info.max_positions} positions"
                )
