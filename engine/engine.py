"""The engine: exact prefill into pages, forks, eviction by a policy, and steps over any number of rows at once."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kvgate.compressors.budgets import Limit, excess
from kvgate.compressors.contract import check_keep
from kvgate.compressors.evidence import Evidence, Keep, Need, Observed, Span
from kvgate.compressors.policy import Policy
from kvgate.compressors.scored import Scored
from kvgate.engine.attention import Step, call_model
from kvgate.engine.gathering import gather_evidence
from kvgate.engine.models import LoadedModel
from kvgate.engine.refusals import refuse_overflow, refuse_policy
from kvgate.engine.sequence import Sequence
from kvgate.engine.slots import Slots
from kvgate.engine.steps import Kind, StepBuilder, kind_of, places
from kvgate.engine.store import PageStore
from kvgate.engine.witness import Scores, Witness
from kvgate.kernels.types import Backend
from kvgate.lifecycle.pool import OutOfPages, PageError, PagePool
from kvgate.lifecycle.tables import Geometry, Tables

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
        self._by_token = loaded.info.numerics in ("order", "portable")
        geometry = Geometry(self.info.layers, self.info.kv_heads, page_size)
        self.tables = Tables(PagePool(pages), geometry)
        parameter = next(loaded.module.parameters())
        self.store = PageStore(self.tables, self.info.head_dim, parameter.dtype, parameter.device, backend)
        self._builder = StepBuilder(loaded.module, self.tables, self.store, self.info.native_windows)
        self._slots = Slots(self.tables, self.store, self.info)
        self._witness = Witness(loaded, self._slots)

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

    def fork(self, parent: Sequence, policy: Policy | None = None, *, budget: int | None = None) -> Sequence:
        """A row that shares ``parent``'s pages, under ``policy`` from now on (None: the parent's own, if any).

        ``budget``: what was promised for the policy; it may give itself less, never more. It is read here, once.
        Evidence that the row's policy does not need is left behind. ValueError if the policy cannot work on
        ``parent``: evidence that was not collected, protected spans that fill its budget, positions it cannot rebase.
        """
        self._require_held(parent)
        if policy is not None and policy != parent.policy:
            refuse_policy(policy, parent, self.info)
        if policy is not None:
            limit = Limit.of(policy, budget)
        child = replace(parent, id=self.tables.fork(parent.id))
        if policy is not None and policy != parent.policy:
            child.policy, child.limit, child.state, child.decided = policy, limit, None, False
        done = child.policy is None or _done(child)
        child.gather(frozenset() if done or child.policy is None else child.policy.needs)
        child.mass = child.mass.clone() if child.mass is not None else None
        return child

    def release(self, row: Sequence) -> None:
        """Give the row's pages back. Releasing twice raises PageError, also when its id is in use again."""
        self._require_held(row)
        self.tables.release(row.id)
        row.released = True
        row.gather(frozenset())

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
        refuse_overflow(self.info, rows, counts)
        kinds = self._kinds(rows, counts)
        order = sorted(range(len(rows)), key=kinds.__getitem__)
        ordered = [rows[index] for index in order]
        sizes = [counts[index] for index in order]
        ends = np.cumsum(sizes)
        wanted = torch.arange(ends[-1]) if every else torch.from_numpy(ends - 1)
        logits, step = self._run(ordered, [tokens[index] for index in order], wanted)
        gather_evidence(ordered, sizes, step, [self._slots.width(row) for row in ordered], self._witness.rotation)
        for index in order:
            if rows[index].needs("probe"):
                rows[index].tokens += tuple(tokens[index])
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
        limit = Limit.of(policy) if policy else None
        row.policy, row.limit, row.state, row.decided = policy, limit, None, False
        row.gather(policy.needs if policy else frozenset())
        evicted = row.evicted
        self.settle(row)
        if policy is not None and row.evicted > evicted:
            self.compact(row)

    def settle(self, row: Sequence) -> None:
        """Free what the model itself no longer attends, then what the row's policy drops."""
        self._slots.drop_native(row)
        if row.limit is None or _done(row):
            return
        counts = self.tables.live_counts(row.id)
        if excess(row.limit, counts, self._slots.exact(row.length), row.length) is not None:
            self.evict(row)

    @torch.inference_mode()
    def evict(self, row: Sequence, *, scores: Scores | None = None, compact: bool = False) -> None:
        """Ask the row's policy what stays, and free the rest. ``compact`` gathers what is left into fewer pages.

        ``scores``: from :meth:`score`, of the policy or one of equal ``scoring`` on a row with the same slots.
        """
        self._require_held(row)
        assert row.policy is not None, "the exact run has no policy to ask"
        before = row.probed
        evidence = self.evidence(row)
        if scores is None:
            keep = row.policy.decide(evidence)
        else:
            assert isinstance(row.policy, Scored), f"policy {row.policy.name} does not select by scores"
            keep = Keep(row.policy.select(evidence, scores.slots))
            row.probed = before + scores.probed
        check_keep(row.policy, evidence, keep, row.limit)
        gone = int((evidence.live & ~keep.slots).sum())
        self._slots.retain(row, keep.slots.cpu().numpy())
        row.state = keep.state
        row.evicted += gone
        row.tainted |= gone > 0
        row.decided = True
        if _done(row):
            row.gather(frozenset())
        if compact:
            self.compact(row)

    @torch.inference_mode()
    def score(self, row: Sequence, policy: Scored) -> Scores:
        """What ``policy`` thinks of the row's slots, for itself and its kin at other budgets; ``row`` stays."""
        self._require_held(row)
        refuse_policy(policy, row, self.info)
        before = row.probed
        slots = policy.score(self.evidence(row, policy.needs))
        probed, row.probed = row.probed - before, before
        return Scores(slots, probed)

    @torch.inference_mode()
    def probe(self, row: Sequence, tokens: Several[int]) -> Observed:
        """Run extra tokens over the row's cache and see what they attend; they are forgotten at once.

        ValueError where the model has no positions left for them.
        """
        self._require_held(row)
        refuse_overflow(self.info, [row], [len(tokens)])
        child = replace(row, id=self.tables.fork(row.id), policy=None, limit=None, collect=frozenset())
        held = self._slots.even(row) if self.store.device.type == "cpu" else None
        try:
            _, step = self._run([child], [tokens], torch.tensor([len(tokens) - 1]), observe=True, beside=held)
        finally:
            self.tables.release(child.id)
        row.probed += len(tokens)
        queries, lse = torch.stack(step.queries), torch.stack(step.lse)
        return Observed(queries.transpose(1, 2), lse.transpose(1, 2), row.length)

    @torch.inference_mode()
    def compact(self, row: Sequence) -> None:
        """Gather the live slots of partly live pages, as far as the pool has room for the copies."""
        try:
            self._slots.follow(row, self.tables.compact(row.id))
        except OutOfPages:
            return  # held slots are reported as held

    def evidence(self, row: Sequence, needs: frozenset[Need] | None = None) -> Evidence:
        """What the row's policy may look at: what the row collects, or of that what ``needs`` asks for."""
        return self._witness.evidence(row, row.collect if needs is None else needs, lambda ids: self.probe(row, ids))

    # -- internals ------------------------------------------------------------------------------------------------

    def _run(
        self,
        rows: Several[Sequence],
        tokens: Several[Several[int]],
        wanted: Tensor,
        *,
        observe: bool = False,
        beside: Tensor | None = None,
    ) -> tuple[Tensor, Step]:
        """Append and run new tokens; on failure the rows are what they were. Logits ``[len(wanted), V]``."""
        sizes = [len(part) for part in tokens]
        kinds = self._kinds(rows, sizes)
        placed = self.tables.append([row.id for row in rows], sizes, [row.length for row in rows])
        try:
            self.store.carry_out(placed)
            step = self._builder.build(rows, sizes, placed.slots, kinds, observe=observe)
            step.beside_LHS, step.by_token = beside, self._by_token
            logits = self._forward([token for part in tokens for token in part], step, wanted)
        except BaseException:
            self._slots.take_back(rows, placed.slots)
            raise
        self._witness.logit_rule = (step.scale, step.softcap)
        return logits, step

    def _kinds(self, rows: Several[Sequence], counts: Several[int]) -> list[Kind]:
        empty = [bool(self.tables.counts[row.id].max() == 0) for row in rows]
        return [
            kind_of(row, count, empty=bare, by_token=self._by_token)
            for row, count, bare in zip(rows, counts, empty, strict=True)
        ]

    def _forward(self, ids: list[int], step: Step, wanted: Tensor) -> Tensor:
        return call_model(self._module, ids, step, wanted, self.store.device)

    def _require_held(self, row: Sequence) -> None:
        if row.released:
            raise PageError(f"sequence {row.id} was released")


def _done(row: Sequence) -> bool:
    """Whether the row's policy has decided for good."""
    return row.limit is not None and row.decided and row.limit.decides == "once"
