"""From lm-eval's samples to records: one a document and configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvgate.evals.data.items import Item, digest
from kvgate.evals.lm_eval.bench import Bench
from kvgate.evals.lm_eval.items import Origin
from kvgate.evals.log.records import CellRecord

SHORTEST_SLICE = 64  # tokens


@dataclass(frozen=True)
class Scored:
    """A document's score under one configuration.

    Attributes:
        document: lm-eval's hash of the document; ``prompt``, ``target``: its hashes of these.
        items: the document's requests, one item a context. ``metric``: ``NAME,FILTER``.
    """

    task: str
    index: int
    document: str
    prompt: str
    target: str
    metric: str
    score: float
    items: tuple[Item, ...]

    @staticmethod
    def of(task: str, sample: Mapping[str, Any], metric: str, asked: Mapping[Origin, Sequence[Item]]) -> Scored:
        """From one of lm-eval's logged samples. ValueError if its metric is no number in [0, 1]."""
        value: Any = sample.get(metric)
        where = f"task {task}, document {sample['doc_id']}"
        number = isinstance(value, int | float | np.number | np.bool_)
        if not number or not 0.0 <= float(value) <= 1.0:
            raise ValueError(f"{where}: {metric} is {value!r}, not a score in [0, 1]; choose another with --metric")
        return Scored(
            task=task,
            index=int(sample["doc_id"]),
            document=sample["doc_hash"],
            prompt=sample["prompt_hash"],
            target=sample["target_hash"],
            metric=f"{metric},{sample['filter']}",
            score=float(value),
            items=tuple(asked[Origin(task, int(sample["doc_id"]))]),
        )

    @property
    def key(self) -> tuple[str, str, str, str, tuple[str, ...]]:
        """What must be the same on both sides of a pair."""
        return (self.task, self.document, self.prompt, self.target, tuple(item.item_hash for item in self.items))


def records_of(bench: Bench, scored: Mapping[str, Mapping[str, Sequence[Scored]]], least: int) -> list[CellRecord]:
    """Records in order of task, document and configuration. ValueError if they were asked about different ones.

    ``least``: documents that a length needs to be a slice of its own.
    """
    labels = [configuration.label for configuration in bench.configurations]
    records: list[CellRecord] = []
    for task, first in scored[labels[0]].items():
        sides = [scored[label][task] for label in labels]
        for label, side in zip(labels, sides, strict=True):
            if [each.key for each in side] != [each.key for each in first]:
                raise ValueError(
                    f"task {task}: lm-eval built other documents or prompts for {label} than for {labels[0]}, so that "
                    "nothing can be paired; the task draws at random without a seed"
                )
        lengths = nominal_lengths([max(item.length for item in each.items) for each in first], least)
        for place, length in enumerate(lengths):
            records += [_record(bench, label, side[place], length) for label, side in zip(labels, sides, strict=True)]
    return records


def _record(bench: Bench, label: str, found: Scored, length: int) -> CellRecord:
    """One record for all requests of a document; memory is that of its largest."""
    raws = [bench.records[item.item_hash][label] for item in found.items]
    base = max(raws, key=lambda raw: raw.context_tokens)
    turns = [replace(turn, score=None, label=found.metric) for raw in raws for turn in raw.turns]
    turns[0] = replace(turns[0], score=found.score)
    return replace(
        base,
        cell_id=digest([raw.cell_id for raw in raws] + [found.document]),
        index=found.index,
        length=length,
        cluster=found.document,
        item_hash=digest(found.key),
        context_hash=digest([raw.context_hash for raw in raws] + [item.turns[0].prompt for item in found.items]),
        score=found.score,
        turns=tuple(turns),
        evicted_tokens=sum(raw.evicted_tokens for raw in raws) / len(raws),
        native=all(raw.native for raw in raws),
        covered=all(raw.covered for raw in raws),
        floored=any(raw.floored for raw in raws),
        resident_bytes=max(raw.resident_bytes for raw in raws),
        logical_bytes=max(raw.logical_bytes for raw in raws),
        exact_resident_bytes=max(raw.exact_resident_bytes for raw in raws),
        output_tokens=sum(raw.output_tokens for raw in raws),
        nan=any(raw.nan for raw in raws),
    )


def nominal_lengths(tokens: Sequence[int], least: int) -> list[int]:
    """The length slice of each prompt: powers of two, from the shortest up until a slice has ``least`` prompts.

    A longest slice that stays smaller joins the one below under its own name. Depends on lengths only, never on scores.
    """
    powers = [max(SHORTEST_SLICE, 1 << (count - 1).bit_length()) for count in tokens]
    names: dict[int, int] = {}
    closed: list[list[int]] = []
    open_: list[int] = []
    for power in sorted(set(powers)):
        open_.append(power)
        if sum(powers.count(each) for each in open_) >= least:
            closed.append(open_)
            open_ = []
    if open_ and closed:
        closed[-1] += open_
    elif open_:
        closed.append(open_)
    for group in closed:
        names.update(dict.fromkeys(group, group[-1]))
    return [names[power] for power in powers]
