"""Runs a unit: one prefill a context, a fork for the exact run and each policy, one batch of rows for all turns.

Only this file and :mod:`kvgate.evals.checks` drive the engine; what they return are finished records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kvgate.compressors.evidence import Span
from kvgate.compressors.policy import Need, Policy
from kvgate.engine.engine import Engine
from kvgate.engine.generate import Generated, continuation_scores, generate
from kvgate.engine.sequence import Sequence as Row
from kvgate.evals.cells import Cell, Unit
from kvgate.evals.items import Choice, Item, Turn
from kvgate.evals.records import CellRecord, TurnRecord
from kvgate.evals.scoring import score_answer, score_choice


@dataclass
class _Running:
    """A cell and its row while a unit runs."""

    cell: Cell
    row: Row
    turns: list[TurnRecord] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    nan: bool = False
    resident: int = 0
    logical: int = 0

    @property
    def item(self) -> Item:
        return self.cell.item


class Runner:
    """Runs units on one engine.

    Args:
        engine: with enough pages for a unit (see :func:`pages_needed`).
        tokenizer: decodes answers for scoring and for readers.
        config_hash: written into every record.
    """

    def __init__(self, engine: Engine, tokenizer: Any, config_hash: str) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._config_hash = config_hash
        self._heads = engine.tables.geometry.heads

    def run(self, unit: Unit) -> list[CellRecord]:
        """One record a cell, in the unit's order. Leaves no page behind, whatever happens."""
        running: list[_Running] = []
        try:
            self._start(unit, running)
            for turn in range(max(len(item.turns) for item in unit.items)):
                self._turn([entry for entry in running if turn < len(entry.item.turns)], turn)
            return self._records(running)
        finally:
            for entry in running:
                self._engine.release(entry.row)

    # -- contexts -------------------------------------------------------------------------------------------------

    def _start(self, unit: Unit, running: list[_Running]) -> None:
        """Prefill each context once, evict once per policy and context, and fork a row for every cell."""
        for prompt, cells in _by_prompt(unit.cells):
            needs: frozenset[Need] = frozenset().union(*(cell.policy.needs for cell in cells if cell.policy))
            protected = tuple(Span(*span) for span in cells[0].item.protected)
            snapshot, _ = self._engine.prefill(prompt, needs=needs, protected=protected)
            evicted: dict[str, Row] = {}
            try:
                for cell in cells:
                    label = cell.column.label
                    row = self._engine.fork(evicted[label]) if label in evicted else self._evicted(snapshot, cell)
                    evicted[label] = row
                    running.append(_Running(cell, row))
            finally:
                self._engine.release(snapshot)
        place = {cell.cell_id: index for index, cell in enumerate(unit.cells)}
        running.sort(key=lambda entry: place[entry.cell.cell_id])

    def _evicted(self, snapshot: Row, cell: Cell) -> Row:
        row = self._engine.fork(snapshot, cell.policy)
        if cell.policy is not None:
            self._engine.evict(row, compact=True)
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
        choices = [i for i, entry in enumerate(entries) if isinstance(entry.item.turns[index].scoring, Choice)]
        written = [i for i in range(len(entries)) if i not in set(choices)]
        if choices:
            self._choose([entries[i] for i in choices], logits[choices], index)
        if written:
            self._write([entries[i] for i in written], logits[written], index)

    def _prompt_ids(self, entry: _Running, index: int) -> list[int]:
        prompt = entry.item.turns[index].prompt
        if index == 0:
            return list(prompt[-1:] if entry.item.protocol == "whole_prompt" else prompt)
        return [*entry.pending, *entry.item.turns[index - 1].closing, *prompt]

    def _write(self, entries: list[_Running], logits: Tensor, index: int) -> None:
        turns = [entry.item.turns[index] for entry in entries]
        stops = [frozenset((*self._engine.info.stop_ids, *turn.stop)) for turn in turns]
        limits = [turn.max_new_tokens for turn in turns]
        answers = generate(self._engine, [entry.row for entry in entries], logits, limits, stops)
        for entry, turn, answer in zip(entries, turns, answers, strict=True):
            entry.turns.append(self._written(turn, answer))
            entry.pending = answer.pending
            entry.nan |= answer.nan

    def _written(self, turn: Turn, answer: Generated) -> TurnRecord:
        text = self._tokenizer.decode(answer.tokens)
        assert not isinstance(turn.scoring, Choice)
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
            entry.turns.append(TurnRecord(turn.label, score, tuple(tokens), text, capped=False, chosen=best))
            entry.pending = list(tokens)
            entry.nan |= any(value != value for value in row_scores)

    # -- records --------------------------------------------------------------------------------------------------

    def _records(self, running: list[_Running]) -> list[CellRecord]:
        exact = {entry.item.item_hash: entry.resident for entry in running if entry.cell.policy is None}
        return [self._record(entry, exact[entry.item.item_hash]) for entry in running]

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
            policy=cell.policy.name if cell.policy else cell.column.name,
            label=cell.column.label,
            params=cell.policy.describe() if cell.policy else {},
            budget=cell.budget,
            ratio=cell.column.ratio,
            score=sum(scored) / len(scored),
            turns=tuple(entry.turns),
            evicted_tokens=row.evicted / self._heads,
            native=cell.policy is not None and is_native(cell.policy, self._engine.info.native_windows),
            covered=cell.policy is not None and cell.policy.budget >= row.length,
            floored=cell.floored,
            resident_bytes=entry.resident,
            logical_bytes=entry.logical,
            exact_resident_bytes=exact_resident,
            context_tokens=len(item.context),
            output_tokens=sum(len(turn.tokens) for turn in entry.turns),
            nan=entry.nan,
        )


def is_native(policy: Policy, windows: Sequence[int | None]) -> bool:
    """Whether the model itself attends no further than the policy keeps, in every layer."""
    bounds = policy.bounds(())
    return bounds is not None and all(window is not None and window <= bounds.window for window in windows)


def pages_needed(engine_heads: int, page_size: int, unit: Unit) -> int:
    """Most pages the unit can hold at once, snapshots and copies included."""

    def pages(tokens: int) -> int:
        return engine_heads * (-(-tokens // page_size) + 2)

    total = sum(pages(len(prompt)) for prompt, _ in _by_prompt(unit.cells))
    for cell in unit.cells:
        spoken = cell.item.longest - len(cell.item.context)
        kept = min(cell.budget or cell.item.longest, cell.item.longest)
        scorings = [turn.scoring for turn in cell.item.turns]
        forks = [candidate for scoring in scorings if isinstance(scoring, Choice) for candidate in scoring.candidates]
        total += pages(kept + spoken) + sum(pages(len(fork)) for fork in forks)
    return total


def _prompt(item: Item) -> tuple[int, ...]:
    """What is prefilled exactly before the eviction."""
    return item.context + item.turns[0].prompt[:-1] if item.protocol == "whole_prompt" else item.context


def _by_prompt(cells: Sequence[Cell]) -> list[tuple[tuple[int, ...], list[Cell]]]:
    groups: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((_prompt(cell.item), cell.item.protected), []).append(cell)
    return [(_prompt(found[0].item), found) for found in groups.values()]
