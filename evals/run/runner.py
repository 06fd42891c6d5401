"""Runs a shard: one prefill a context, a fork for the exact run and each policy, one batch of rows for all turns.

Only this file and :mod:`kvgate.evals.run.self_checks` drive the engine; what they return are finished records.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from kvgate.compressors.evidence import Need, Span
from kvgate.compressors.policy import Policy
from kvgate.compressors.scored import Scored
from kvgate.engine.engine import Engine
from kvgate.engine.generate import Generated, continuation_scores, generate, likelihoods
from kvgate.engine.sequence import Sequence as Row
from kvgate.engine.witness import Scores
from kvgate.evals.data.items import Choice, External, Fidelity, Item, Turn, candidates_of
from kvgate.evals.log.records import CellRecord, TurnRecord
from kvgate.evals.plan.cells import Cell, Shard
from kvgate.evals.run.fidelity import Followed, follow
from kvgate.evals.run.prompts import by_prompt, prompt_of
from kvgate.evals.scoring.scores import score_answer, score_choice
from kvgate.lifecycle.tables import Tables


@dataclass
class _Running:
    """A cell and its row while a shard runs."""

    cell: Cell
    row: Row
    turns: list[TurnRecord] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    nan: bool = False
    resident: int = 0
    logical: int = 0
    facts_kept: tuple[tuple[int, ...], ...] | None = None

    @property
    def item(self) -> Item:
        return self.cell.item


class Runner:
    """Runs shards on one engine.

    Args:
        engine: with enough pages for a shard (see :func:`kvgate.evals.run.prompts.pages_needed`).
        tokenizer: decodes answers for scoring and for readers.
        config_hash: written into every record.
    """

    def __init__(self, engine: Engine, tokenizer: Any, config_hash: str) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._config_hash = config_hash
        self._heads = engine.tables.geometry.heads

    def run(self, shard: Shard) -> list[CellRecord]:
        """One record a cell, in the shard's order. Leaves no page behind, whatever happens."""
        running: list[_Running] = []
        try:
            self._start(shard, running)
            for turn in range(max(len(item.turns) for item in shard.items)):
                self._turn([entry for entry in running if turn < len(entry.item.turns)], turn)
            return self._records(running)
        finally:
            for entry in running:
                self._engine.release(entry.row)

    # -- contexts -------------------------------------------------------------------------------------------------

    def _start(self, shard: Shard, running: list[_Running]) -> None:
        """Prefill each context once, evict once per policy and context, and fork a row for every cell."""
        for prompt, cells in by_prompt(shard.cells):
            needs: frozenset[Need] = frozenset().union(*(cell.policy.needs for cell in cells if cell.policy))
            protected = tuple(Span(*span) for span in cells[0].item.protected)
            snapshot = self._exact(prompt, needs, protected)
            evicted: dict[str, Row] = {}
            scores: dict[tuple[Any, ...], Scores] = {}
            try:
                for cell in cells:
                    label = cell.configuration.label
                    known = label in evicted
                    row = self._engine.fork(evicted[label]) if known else self._evicted(snapshot, cell, scores)
                    evicted[label] = row
                    running.append(_Running(cell, row))
            finally:
                self._engine.release(snapshot)
        place = {cell.cell_id: index for index, cell in enumerate(shard.cells)}
        running.sort(key=lambda entry: place[entry.cell.cell_id])

    def _exact(self, prompt: tuple[int, ...], needs: frozenset[Need], protected: tuple[Span, ...]) -> Row:
        if not prompt:  # a whole prompt of one token: all of it is held back
            return self._engine.begin(needs=needs, protected=protected)
        return self._engine.prefill(prompt, needs=needs, protected=protected)[0]

    def _evicted(self, snapshot: Row, cell: Cell, scores: dict[tuple[Any, ...], Scores]) -> Row:
        """``scores``: of this snapshot so far, shared by all budgets and shapes of a policy."""
        row = self._engine.fork(snapshot, cell.policy, budget=cell.budget)
        if cell.policy is None or not row.length:
            return row
        found = None
        if isinstance(cell.policy, Scored):
            key = cell.policy.scoring()
            found = scores[key] if key in scores else self._engine.score(snapshot, cell.policy)
            scores[key] = found
        self._engine.evict(row, scores=found, compact=True)
        return row

    # -- turns ----------------------------------------------------------------------------------------------------

    def _turn(self, entries: list[_Running], index: int) -> None:
        prompts = [self._prompt_ids(entry, index) for entry in entries]
        logits = self._engine.extend([entry.row for entry in entries], prompts)
        for entry in entries:
            if entry.cell.policy is not None:
                self._engine.compact(entry.row)
            if index == 0:
                entry.resident = self._engine.resident_pages(entry.row) * self._engine.store.page_bytes
                entry.logical = self._engine.live_tokens(entry.row) * self._engine.store.token_bytes
                entry.facts_kept = kept_percent(self._engine.tables, entry.row.id, entry.item.facts)
        ways = [self._way(entry.item.turns[index]) for entry in entries]
        for way in (self._choose, self._weigh, self._follow, self._write):
            taken = [i for i, found in enumerate(ways) if found == way]
            if taken:
                way([entries[i] for i in taken], logits[taken], index)

    def _way(self, turn: Turn) -> Callable[[list[_Running], Tensor, int], None]:
        """How the turn is answered."""
        if isinstance(turn.scoring, Choice):
            return self._choose
        if isinstance(turn.scoring, Fidelity):
            return self._follow
        return self._weigh if candidates_of(turn) else self._write

    def _prompt_ids(self, entry: _Running, index: int) -> list[int]:
        prompt = entry.item.turns[index].prompt
        if index == 0:
            return list(prompt[-1:] if entry.item.protocol == "whole_prompt" else prompt)
        return [*entry.pending, *entry.item.turns[index - 1].closing, *prompt]

    def _write(self, entries: list[_Running], logits: Tensor, index: int) -> None:
        turns = [entry.item.turns[index] for entry in entries]
        stops = [frozenset((*self._engine.info.stop_ids, *turn.stop)) for turn in turns]
        limits = [turn.max_new_tokens for turn in turns]

        def ended(place: int, tokens: Sequence[int]) -> bool:
            until = turns[place].until
            return bool(until) and any(stop in self._tokenizer.decode(list(tokens)) for stop in until)

        def unsaid(place: int, tokens: Sequence[int]) -> bool:
            return tokens[-1] in turns[place].stop and not self._tokenizer.decode(list(tokens)).strip()

        answers = generate(self._engine, [entry.row for entry in entries], logits, limits, stops, ended, unsaid)
        for entry, turn, answer in zip(entries, turns, answers, strict=True):
            entry.turns.append(self._written(turn, answer))
            entry.pending = answer.pending
            entry.nan |= answer.nan

    def _written(self, turn: Turn, answer: Generated) -> TurnRecord:
        text = self._tokenizer.decode(answer.tokens)
        assert not isinstance(turn.scoring, Choice | Fidelity)
        if isinstance(turn.scoring, External):
            score: float | None = 0.0
        else:
            score = None if turn.scoring is None else score_answer(text, turn.scoring)
        return TurnRecord(turn.label, score, tuple(answer.tokens), text, answer.capped)

    def _choose(self, entries: list[_Running], logits: Tensor, index: int) -> None:
        turns = [entry.item.turns[index] for entry in entries]
        candidates = [turn.scoring.candidates for turn in turns if isinstance(turn.scoring, Choice)]
        scores = continuation_scores(self._engine, [entry.row for entry in entries], logits, candidates)
        for entry, turn, row_scores in zip(entries, turns, scores, strict=True):
            assert isinstance(turn.scoring, Choice)
            best = max(range(len(row_scores)), key=row_scores.__getitem__)
            tokens = turn.scoring.candidates[best]
            score = score_choice(row_scores, turn.scoring.gold)
            text = self._tokenizer.decode(list(tokens))
            measured = tuple(value if math.isfinite(value) else None for value in row_scores)
            record = TurnRecord(turn.label, score, tuple(tokens), text, False, best, candidate_scores=measured)
            entry.turns.append(record)
            entry.pending = list(tokens)
            entry.nan |= any(value != value for value in row_scores)

    def _weigh(self, entries: list[_Running], logits: Tensor, index: int) -> None:
        """Likelihoods for somebody else to score."""
        turns = [entry.item.turns[index] for entry in entries]
        candidates = [candidates_of(turn) for turn in turns]
        found = likelihoods(self._engine, [entry.row for entry in entries], logits, candidates)
        for entry, turn, row in zip(entries, turns, found, strict=True):
            totals = [each.total for each in row]
            best = max(range(len(totals)), key=totals.__getitem__)
            tokens = candidates_of(turn)[best]
            text = self._tokenizer.decode(list(tokens))
            entry.nan |= not all(map(math.isfinite, totals))
            measured = None if entry.nan else tuple((each.total, each.greedy) for each in row)
            entry.turns.append(TurnRecord(turn.label, 0.0, tokens, text, False, best, likelihoods=measured))
            entry.pending = list(tokens)

    def _follow(self, entries: list[_Running], logits: Tensor, index: int) -> None:
        """Every policy is fed the exact run's answer."""
        exact = {entry.item.item_hash: place for place, entry in enumerate(entries) if entry.cell.policy is None}
        leaders = [exact[entry.item.item_hash] for entry in entries]
        turns = [entry.item.turns[index] for entry in entries]
        stops = [frozenset((*self._engine.info.stop_ids, *turn.stop)) for turn in turns]
        limits = [turn.max_new_tokens for turn in turns]
        found = follow(self._engine, [entry.row for entry in entries], leaders, logits, limits, stops)
        for entry, turn, followed in zip(entries, turns, found, strict=True):
            entry.turns.append(self._followed(turn, followed))
            entry.pending = followed.pending
            entry.nan |= followed.nan

    def _followed(self, turn: Turn, followed: Followed) -> TurnRecord:
        tokens = tuple(followed.tokens)
        text = self._tokenizer.decode(list(tokens))
        return TurnRecord(turn.label, followed.agreement, tokens, text, followed.capped, fidelity=followed.record)

    # -- records --------------------------------------------------------------------------------------------------

    def _records(self, running: list[_Running]) -> list[CellRecord]:
        exact = {entry.item.item_hash: entry.resident for entry in running if entry.cell.policy is None}
        # A shard without exact rows is run for its answers only, and gets on no leaderboard.
        return [self._record(entry, exact.get(entry.item.item_hash, 0)) for entry in running]

    def _record(self, entry: _Running, exact_resident: int) -> CellRecord:
        cell, item, row = entry.cell, entry.item, entry.row
        scored = [turn.score for turn in entry.turns if turn.score is not None]
        return CellRecord(
            cell_id=cell.cell_id,
            config_hash=self._config_hash,
            suite=item.suite,
            task=item.task,
            index=item.index,
            length=item.length,
            depth=item.depth,
            cluster=item.cluster,
            item_hash=item.item_hash,
            context_hash=item.context_hash,
            protocol=item.protocol,
            policy=cell.policy.name if cell.policy else cell.configuration.name,
            label=cell.configuration.label,
            params=cell.policy.describe() if cell.policy else {},
            budget=cell.budget,
            ratio=cell.configuration.ratio,
            score=sum(scored) / len(scored),
            turns=tuple(entry.turns),
            evicted_tokens=row.evicted / self._heads,
            native=cell.policy is not None and is_native(cell.policy, self._engine.info.native_windows),
            covered=row.limit is not None and row.limit.covers(len(prompt_of(item)), row.length),
            floored=cell.floored,
            resident_bytes=entry.resident,
            logical_bytes=entry.logical,
            exact_resident_bytes=exact_resident,
            context_tokens=len(item.context),
            output_tokens=sum(len(turn.tokens) for turn in entry.turns),
            nan=entry.nan,
            facts_kept=entry.facts_kept,
            settings=dict(cell.configuration.params),
            probe_tokens=row.probed,
        )


def kept_percent(tables: Tables, sequence: int, facts: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], ...] | None:
    """For each token of each span of positions, the share of page lists that hold it live, in percent, rounded down.

    Rounding down makes 100 mean everywhere; 0 means nowhere or in less than one list of a hundred.
    """
    if not facts:
        return None
    live = tables.live_slots(sequence)
    pages = tables.pages[sequence, :, :, : live.shape[-1] // tables.geometry.page_size]
    positions = tables.positions[pages].reshape(live.shape)[live]
    counts = np.bincount(positions, minlength=max(end for _, end in facts)) * 100 // tables.geometry.heads
    return tuple(tuple(counts[start:end].tolist()) for start, end in facts)


def is_native(policy: Policy, windows: Sequence[int | None]) -> bool:
    """Whether the model itself attends no further than the policy keeps, in every layer."""
    bounds = policy.bounds(())
    return bounds is not None and all(window is not None and window <= bounds.window for window in windows)
