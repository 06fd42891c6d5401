"""Answers lm-eval requests for the exact run and any number of policies from one prefill a context."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

import torch

from kvgate.compressors.evidence import Need
from kvgate.engine.engine import Engine
from kvgate.engine.models import LoadedModel
from kvgate.engine.sequence import Sequence as Row
from kvgate.evals.data.items import Ids, Item, digest
from kvgate.evals.data.tokens import DEFAULT_DATE
from kvgate.evals.log.records import CellRecord
from kvgate.evals.plan.cells import Configuration, Shard, make_cell, shards
from kvgate.evals.run.identity import Identity, identity
from kvgate.evals.run.prompts import pages_needed
from kvgate.evals.run.runner import Runner

ROLLING_CHUNK = 64  # tokens between two evictions in ``loglikelihood_rolling``


@dataclass(frozen=True)
class Settings:
    """What besides model and policy could change an answer; see :class:`kvgate.evals.run.identity.Identity`."""

    page_size: int = 16
    prefill_chunk: int = 2048
    batch_rows: int = 48
    date: str = DEFAULT_DATE


@dataclass
class Bench:
    """A model, the configurations to answer for, and everything answered so far.

    Attributes:
        records: raw ones by item hash, then label, with score 0: lm-eval scores.
        shards: all that were run, in order. ``report`` is told the number of finished cells.
    """

    loaded: LoadedModel
    configurations: Sequence[Configuration]
    settings: Settings = field(default_factory=Settings)
    config_hash: str = ""
    report: Callable[[int], None] = lambda cells: None
    records: dict[str, dict[str, CellRecord]] = field(default_factory=dict)
    shards: list[Shard] = field(default_factory=list)
    _rolled: dict[str, list[float]] = field(default_factory=dict)
    _engine: Engine | None = None

    @cached_property
    def identity(self) -> Identity:
        """What decides an answer besides policies and requests."""
        return identity(self.settings, self.loaded.info, self.loaded.tokenizer)

    @property
    def fingerprint(self) -> str:
        """Of everything but policies and requests."""
        return self.identity.fingerprint

    def answer(self, items: Sequence[Item]) -> None:
        """Run the items that are not answered yet, under every configuration."""
        new = {item.item_hash: item for item in items if item.item_hash not in self.records}
        made = list(shards(list(new.values()), self.configurations, self.settings.batch_rows, self.fingerprint))
        if not made:
            return
        runner = self.runner(made)
        for shard in made:
            for record in runner.run(shard):
                self.records.setdefault(record.item_hash, {})[record.label] = record
            self.shards.append(shard)
            self.report(sum(map(len, self.records.values())))

    def runner(self, wanted: Sequence[Shard]) -> Runner:
        """A runner whose pool holds each of the shards."""
        heads = self.loaded.info.layers * self.loaded.info.kv_heads
        pages = max(pages_needed(heads, self.settings.page_size, shard) for shard in wanted)
        return Runner(self._engine_with(pages), self.loaded.tokenizer, self.config_hash)

    def rolling(self, context: Ids, continuation: Ids) -> list[float]:
        """Log-likelihood in nats of ``continuation`` after ``context``, for every configuration; bounded memory.

        The tokens are fed :data:`ROLLING_CHUNK` at a time and each policy evicts between chunks, down to its budget, so
        that all but the first tokens are predicted from an evicted cache, and from hidden states that saw one (the
        ``chunked`` protocol). A ratio is one of context and continuation together.
        """
        key = digest([context, continuation])
        if key not in self._rolled:
            self._rolled[key] = self._roll(context, continuation)
        return self._rolled[key]

    @torch.inference_mode()
    def _roll(self, context: Ids, continuation: Ids) -> list[float]:
        tokens = context + continuation
        item = Item("lm_eval", "rolling", 0, len(tokens), tokens, (), "rolling")
        cells = [make_cell(item, configuration, self.fingerprint) for configuration in self.configurations]
        policies = [cell.policy for cell in cells]
        for policy in policies:
            if policy is not None and policy.decides == "once":
                raise ValueError(
                    f"policy {policy.name}: evicts once, after a prompt, and rolling likelihoods have none"
                )
        needs: frozenset[Need] = frozenset().union(*(policy.needs for policy in policies if policy))
        heads = self.loaded.info.layers * self.loaded.info.kv_heads
        engine = self._engine_with(heads * (-(-len(tokens) // self.settings.page_size) + 2) * (len(policies) + 1))
        start = engine.begin(needs=needs)
        rows = [engine.fork(start, cell.policy, budget=cell.budget) for cell in cells]
        engine.release(start)
        try:
            return _fed(engine, rows, tokens, len(context))
        finally:
            for row in rows:
                engine.release(row)

    def _engine_with(self, pages: int) -> Engine:
        if self._engine is None or self._engine.tables.pool.total < pages:
            own = self.settings
            self._engine = Engine(self.loaded, pages=pages, page_size=own.page_size, prefill_chunk=own.prefill_chunk)
        return self._engine


def _fed(engine: Engine, rows: Sequence[Row], tokens: Ids, known: int) -> list[float]:
    """Sum over the tokens from ``known`` on of each row's log-probability, fp32."""
    totals = [0.0] * len(rows)
    rest = iter(tokens[:-1])
    done = 0
    while chunk := list(islice(rest, ROLLING_CHUNK)):
        logits = engine.extend(rows, [chunk] * len(rows), every=True).view(len(rows), len(chunk), -1)
        wanted = torch.tensor(tokens[done + 1 : done + 1 + len(chunk)], device=logits.device)
        scores = torch.log_softmax(logits, -1)[:, torch.arange(len(chunk)), wanted]
        first = max(0, known - 1 - done)
        totals = [total + float(row[first:].double().sum()) for total, row in zip(totals, scores, strict=True)]
        done += len(chunk)
    return totals


def only(configurations: Sequence[Configuration], label: str) -> int:
    """The configuration's place. ValueError if it is not there."""
    labels: list[Any] = [configuration.label for configuration in configurations]
    if label not in labels:
        raise ValueError(f"policy {label!r}: this bench answers for {', '.join(labels)}")
    return labels.index(label)
