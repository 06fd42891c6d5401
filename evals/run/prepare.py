"""From a plan to what is run: items, batches, identity, manifest. Everything that can be refused is refused here."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kvgate.compressors.evidence import Span
from kvgate.engine.engine import Engine
from kvgate.engine.models import LoadedModel, load_model
from kvgate.engine.refusals import refuse_policy
from kvgate.engine.sequence import Sequence as Row
from kvgate.evals.data.items import Item, digest
from kvgate.evals.data.tokens import Tokens
from kvgate.evals.judge.gates import load_gate
from kvgate.evals.judge.order import order_hashes
from kvgate.evals.log.records import SCHEMA_VERSION
from kvgate.evals.plan.cells import Configuration, Shard, configurations
from kvgate.evals.plan.config import RunConfig, SuiteChoice
from kvgate.evals.run.dependence import joined, require_declared
from kvgate.evals.run.early_stopping import items_in, round_shards, rounds
from kvgate.evals.run.identity import Identity, identity
from kvgate.evals.run.prompts import pages_needed, prompt_of
from kvgate.evals.run.provenance import provenance
from kvgate.evals.suites.base import BuildSpec
from kvgate.evals.suites.catalog import suite_class
from kvgate.lifecycle.tables import Geometry

GIB = 1 << 30


@dataclass(frozen=True)
class Work:
    """What a plan asks of one identity: made from the tokenizer alone, without weights.

    ``items``: in the order they are run, drawn by the plan's seed. ``batches``: shards that belong together: all of
    them, or those of each round of a run that stops when decided.
    """

    config: RunConfig
    identity: Identity
    items: tuple[Item, ...]
    configurations: tuple[Configuration, ...]
    batches: tuple[tuple[Shard, ...], ...]

    @property
    def shards(self) -> tuple[Shard, ...]:
        """In the order they are run."""
        return tuple(shard for batch in self.batches for shard in batch)

    @property
    def plan(self) -> dict[str, Any]:
        """The plan as plain data."""
        return asdict(self.config)

    @property
    def config_hash(self) -> str:
        """Of plan, items in order, and identity."""
        return self.identity.config_hash(self.plan, self.items)

    def manifest(self, origin: dict[str, Any]) -> dict[str, Any]:
        """``run.json``. ``origin``: :func:`kvgate.evals.run.provenance.provenance`."""
        return {
            "schema_version": SCHEMA_VERSION,
            "plan": self.plan,
            "identity": asdict(self.identity),
            "config_hash": self.config_hash,
            "items": len(self.items),
            "items_hash": items_hash([item.item_hash for item in self.items]),
            "order": drawn_order(self.batches),
            "columns": [described(configuration) for configuration in self.configurations],
            "provenance": origin,
        }


def items_hash(hashes: Sequence[str]) -> str:
    """BLAKE2b-128 of item hashes in order."""
    return digest(list(hashes))


def drawn_order(batches: Sequence[Sequence[Shard]]) -> list[str]:
    """A hash after every batch of the items up to there, as they are run."""
    return order_hashes([[item.item_hash for shard in batch for item in shard.items] for batch in batches])


def described(configuration: Configuration) -> dict[str, Any]:
    """A configuration as plain data, for readers that know no policies."""
    return {
        "label": configuration.label,
        "policy": configuration.name,
        "settings": dict(configuration.params),
        "request": configuration.request,
        "oracle": configuration.oracle,
    }


@dataclass(frozen=True)
class Prepared:
    """Work, the model that is to do it, and the manifest."""

    work: Work
    loaded: LoadedModel
    manifest: dict[str, Any]

    @property
    def config(self) -> RunConfig:
        """The plan."""
        return self.work.config

    @property
    def items(self) -> tuple[Item, ...]:
        """All items of the plan."""
        return self.work.items

    @property
    def batches(self) -> tuple[tuple[Shard, ...], ...]:
        """See :class:`Work`."""
        return self.work.batches

    @property
    def shards(self) -> tuple[Shard, ...]:
        """In the order they are run."""
        return self.work.shards


def prepare(config: RunConfig) -> Prepared:
    """Load the model, make the items, resolve every budget. ValueError for anything that could not run."""
    load_gate(config.gate)
    configurations(config)
    for choice in config.suites:
        suite_class(choice.name)
    loaded = load_model(config.model, dtype=config.dtype, revision=config.revision, numerics=config.numerics)
    Geometry(loaded.info.layers, loaded.info.kv_heads, config.page_size)  # refuses a page size that cannot be served
    work = make_work(config, loaded.tokenizer, identity(config, loaded.info, loaded.tokenizer))
    prepared = Prepared(work, loaded, work.manifest(provenance(loaded.info)))
    _require_room(prepared)
    return prepared


def make_work(config: RunConfig, tokenizer: Any, who: Identity) -> Work:
    """Items, configurations and shards of a plan. ValueError for what cannot be built."""
    found = configurations(config)
    items = [item for choice in config.suites for item in build_items(choice, tokenizer, config)]
    _require_distinct(items)
    require_declared(items)
    order = rounds(items, load_gate(config.gate), config.seed)
    until = config.until_decided
    if until is None:  # nobody looks in between, so a suite's items may share batches whatever their round
        place = {suite: number for number, suite in enumerate(dict.fromkeys(item.suite for item in items))}
        order = [
            sorted((item for group in order for item in group), key=lambda item: (place[item.suite], item.protocol))
        ]
    made = round_shards(order, found, config.batch_rows, who.fingerprint)
    if until is not None and until.items is not None and until.items < (first := items_in(made[0])):
        raise ValueError(f"plan {config.name}: a cap of {until.items} items; the first round alone has {first}")
    return Work(config, who, tuple(item for group in order for item in group), tuple(found), made)


def _require_distinct(items: Sequence[Item]) -> None:
    """ValueError for an item that two entries of a plan make."""
    seen: dict[str, Item] = {}
    for item in items:
        if seen.setdefault(item.item_hash, item) is not item:
            raise ValueError(f"item {item.suite}/{item.task}/{item.index}: made twice; list each suite and length once")


def _require_room(prepared: Prepared) -> None:
    """ValueError for an item longer than the model, a pool smaller than a batch, a policy the model cannot take."""
    config, info = prepared.config, prepared.loaded.info
    for item in prepared.items:
        if item.longest > info.max_positions:
            raise ValueError(
                f"item {item.suite}/{item.task}/{item.index}: needs {item.longest} positions, the model has "
                f"{info.max_positions}; ask for shorter lengths"
            )
    needed = most_pages(prepared)
    if 0 < config.pages < needed:
        raise ValueError(f"plan {config.name}: pages is {config.pages}, a batch may need {needed}; use 0 or that many")
    page = 2 * config.page_size * info.head_dim * (4 if info.dtype == "float32" else 2)  # bytes of K and V
    if (wanted := (config.pages or needed) * page) > (most := _memory(info.device)):
        raise ValueError(
            f"plan {config.name}: its pages take {wanted / GIB:.1f} GiB, {info.device} has {most / GIB:.1f} GiB; ask "
            "for fewer batch_rows, shorter lengths or fewer pages"
        )
    for cell in (cell for shard in prepared.shards for cell in shard.cells):
        if cell.policy is not None:
            row = Row(0, protected=tuple(Span(*span) for span in cell.item.protected))
            refuse_policy(cell.policy, row, info)
            prompt = prompt_of(cell.item)
            if len(prompt) + (extra := cell.policy.probe_tokens(len(prompt))) > info.max_positions:
                raise ValueError(
                    f"policy {cell.policy.name}: runs up to {extra} more tokens over the {len(prompt)} of "
                    f"{cell.item.suite}/{cell.item.task}, the model has {info.max_positions} positions; "
                    "ask for shorter lengths"
                )


def _memory(device: str) -> int:
    """Bytes of the device's whole memory."""
    if device == "cuda":
        import torch

        return int(torch.cuda.mem_get_info()[1])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def most_pages(prepared: Prepared) -> int:
    """Pages that the largest shard can hold at once."""
    info = prepared.loaded.info
    heads = info.layers * info.kv_heads
    return max(pages_needed(heads, prepared.config.page_size, shard) for shard in prepared.shards)


def build_items(choice: SuiteChoice, tokenizer: Any, config: RunConfig) -> list[Item]:
    """The items of a plan's suite, of all its seeds. Rows of a data set do not follow the seed and come once."""
    suite, found = suite_class(choice.name), dict[str, Item]()
    for seed in config.item_seeds:
        for item in _seeded_items(choice, tokenizer, config, seed):
            if item.item_hash not in found:
                found[item.item_hash] = item
    made = list(found.values())
    if not all(suite.has_source(task) for task in suite.tasks):
        made = joined(made)
    if len(config.item_seeds) > 1:  # indices count within the task, over all seeds
        count: Counter[tuple[str, int]] = Counter()
        for place, item in enumerate(made):
            made[place] = replace(item, index=count[item.task, item.length])
            count[item.task, item.length] += 1
    return made


def _seeded_items(choice: SuiteChoice, tokenizer: Any, config: RunConfig, seed: int) -> list[Item]:
    suite = suite_class(choice.name)
    asked: dict[str, Any] = {"counts": choice.counts, "depths": choice.depths, "tasks": choice.tasks}
    given = {key: value for key, value in {**asked, "options": choice.options}.items() if value}
    tokens = tokenizer if isinstance(tokenizer, Tokens) else Tokens(tokenizer, config.date)
    items = suite().build(tokens, BuildSpec(seed=seed, **given))
    if choice.protocol == "whole_prompt":
        several = [item for item in items if len(item.turns) > 1]
        if several:
            raise ValueError(
                f"suite {choice.name}: protocol whole_prompt needs items of one turn; {several[0].task} has more"
            )
    if len(config.item_seeds) > 1:  # a made context is another one under another seed, a source document is not
        items = [
            item if suite.has_source(item.task) else replace(item, cluster=f"{item.cluster}-seed{seed}")
            for item in items
        ]
    return [replace(item, protocol=choice.protocol) if choice.protocol else item for item in items]


def make_engine(prepared: Prepared) -> Engine:
    """An engine whose pool holds any shard of the plan."""
    config = prepared.config
    pages = config.pages or most_pages(prepared)
    return Engine(prepared.loaded, pages=pages, page_size=config.page_size, prefill_chunk=config.prefill_chunk)
