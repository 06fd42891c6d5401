"""The main job: plan in, results folder out. Resumable; the same plan ends with the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvgate.compressors.evidence import Span
from kvgate.engine.engine import Engine
from kvgate.engine.models import LoadedModel, load_model
from kvgate.engine.refusals import refuse_policy
from kvgate.engine.sequence import Sequence as Row
from kvgate.evals.data.items import Item, digest
from kvgate.evals.data.tokens import Tokens
from kvgate.evals.judge.gates import load_gate
from kvgate.evals.leaderboard.finished import FinishedRun, oracle_reasons
from kvgate.evals.log.records import SCHEMA_VERSION, CellRecord
from kvgate.evals.log.run_folder import CHECKS, LEADERBOARD, MANIFEST, STOP, RunFolder, read_json, write_json
from kvgate.evals.plan.cells import Column, Unit, columns, units
from kvgate.evals.plan.config import RunConfig, SuiteChoice
from kvgate.evals.run.early_stopping import Watch, items_in, round_units, rounds
from kvgate.evals.run.provenance import provenance
from kvgate.evals.run.runner import Runner, pages_needed
from kvgate.evals.run.self_checks import run_checks
from kvgate.evals.suites.base import Order
from kvgate.evals.suites.catalog import suite_class
from kvgate.lifecycle.tables import Geometry


@dataclass(frozen=True)
class Prepared:
    """A plan with its model loaded and its items made: everything that can be refused has been.

    ``batches``: units that belong together: all of them, or those of each round of a run that stops when decided.
    """

    config: RunConfig
    loaded: LoadedModel
    items: tuple[Item, ...]
    columns: tuple[Column, ...]
    batches: tuple[tuple[Unit, ...], ...]
    manifest: dict[str, Any]

    @property
    def units(self) -> tuple[Unit, ...]:
        """In the order they are run."""
        return tuple(unit for batch in self.batches for unit in batch)


@dataclass(frozen=True)
class Progress:
    """Told after every unit. ``done`` and ``total`` count cells; ``fresh`` those of them run by this process."""

    done: int
    total: int
    fresh: int
    note: str


def prepare(config: RunConfig) -> Prepared:
    """Load the model, make the items, resolve every budget. ValueError for anything that could not run."""
    gate = load_gate(config.gate)
    found = columns(config)
    for choice in config.suites:
        suite_class(choice.name)
    loaded = load_model(config.model, dtype=config.dtype, revision=config.revision)
    items = [item for choice in config.suites for item in build_items(choice, loaded.tokenizer, config.seed)]
    for item in items:
        if item.longest > loaded.info.max_positions:
            raise ValueError(
                f"item {item.suite}/{item.task}/{item.index}: needs {item.longest} positions, the model has "
                f"{loaded.info.max_positions}; ask for shorter lengths"
            )
    Geometry(loaded.info.layers, loaded.info.kv_heads, config.page_size)  # refuses a page size that cannot be served
    origin = provenance(loaded.info)
    plan = asdict(config)
    outcome = [plan, [item.item_hash for item in items], loaded.info.weights_hash, loaded.info.device]
    setting = [config.dtype, config.page_size, config.prefill_chunk, config.batch_rows]
    fingerprint = digest([*setting, loaded.info.weights_hash, loaded.info.device])
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "plan": plan,
        "config_hash": digest(outcome),
        "items": len(items),
        "provenance": origin,
    }
    until = config.until_decided
    if until is None:
        made: tuple[tuple[Unit, ...], ...] = (tuple(units(items, found, config.batch_rows, fingerprint)),)
    else:
        made = round_units(rounds(items, gate, config.seed), found, config.batch_rows, fingerprint)
        if until.items is not None and until.items < (first := items_in(made[0])):
            raise ValueError(f"plan {config.name}: a cap of {until.items} items; the first round alone has {first}")
    prepared = Prepared(config, loaded, tuple(items), tuple(found), made, manifest)
    if 0 < config.pages < (needed := most_pages(prepared)):
        raise ValueError(f"plan {config.name}: pages is {config.pages}, a batch may need {needed}; use 0 or that many")
    for cell in (cell for unit in prepared.units for cell in unit.cells):
        if cell.policy is not None:
            row = Row(0, protected=tuple(Span(*span) for span in cell.item.protected))
            refuse_policy(cell.policy, row, loaded.info)
    return prepared


def most_pages(prepared: Prepared) -> int:
    """Pages that the largest unit can hold at once."""
    info = prepared.loaded.info
    heads = info.layers * info.kv_heads
    return max(pages_needed(heads, prepared.config.page_size, unit) for unit in prepared.units)


def build_items(choice: SuiteChoice, tokenizer: Any, seed: int) -> list[Item]:
    """The items of a plan's suite."""
    asked: dict[str, Any] = {"counts": choice.counts, "depths": choice.depths, "tasks": choice.tasks}
    given = {key: value for key, value in {**asked, "options": choice.options}.items() if value}
    items = suite_class(choice.name)().build(Tokens(tokenizer), Order(seed=seed, **given))
    if choice.protocol == "whole_prompt":
        several = [item for item in items if len(item.turns) > 1]
        if several:
            raise ValueError(
                f"suite {choice.name}: protocol whole_prompt needs items of one turn; {several[0].task} has more"
            )
    return [replace(item, protocol=choice.protocol) if choice.protocol else item for item in items]


def make_engine(prepared: Prepared) -> Engine:
    """An engine whose pool holds any unit of the plan."""
    config = prepared.config
    pages = config.pages or most_pages(prepared)
    return Engine(prepared.loaded, pages=pages, page_size=config.page_size, prefill_chunk=config.prefill_chunk)


def execute(
    prepared: Prepared, out: Path, report: Callable[[Progress], None] = lambda progress: None
) -> dict[str, Any]:
    """Run what is not there yet, then check and judge. Returns the leaderboard, which is also written to ``out``."""
    folder = RunFolder(out, prepared.manifest)
    records = folder.resume(prepared.units)
    runner = Runner(make_engine(prepared), prepared.loaded.tokenizer, prepared.manifest["config_hash"])
    total = sum(len(unit.cells) for unit in prepared.units)
    resumed = len(records)
    report(Progress(resumed, total, 0, "resumed" if resumed else "started"))
    watch = _watch(prepared, folder)
    ran: list[Unit] = []
    at = 0
    for batch in prepared.batches:
        if watch is not None and watch.over(batch):
            break
        start, before = at, len(records)
        for unit in batch:
            if at == len(records):
                made = runner.run(unit)
                folder.append(made)
                records += made
                first = unit.items[0]
                report(Progress(len(records), total, len(records) - resumed, f"{first.suite} {first.length}"))
            at += len(unit.cells)
            ran.append(unit)
        if watch is not None and watch.look(batch, records[start:at], fresh=len(records) > before):
            break
    if watch is not None:
        write_json(out / STOP, watch.stop)
    checks = _checks(folder, runner, ran, records, report)
    finished = FinishedRun(out, read_json(out / MANIFEST), tuple(records), checks, watch.stop if watch else None)
    leaderboard = finished.leaderboard()
    write_json(out / LEADERBOARD, leaderboard)
    return leaderboard


def _watch(prepared: Prepared, folder: RunFolder) -> Watch | None:
    config = prepared.config
    if config.until_decided is None:
        return None
    declared = oracle_reasons(read_json(folder.path / MANIFEST))
    stopped = read_json(folder.path / STOP) if (folder.path / STOP).exists() else None
    return Watch(load_gate(config.gate), config.until_decided, len(prepared.items), declared, stopped)


def _checks(
    folder: RunFolder,
    runner: Runner,
    all_units: Sequence[Unit],
    records: Sequence[CellRecord],
    report: Callable[[Progress], None],
) -> dict[str, Any]:
    path = folder.path / CHECKS
    if path.exists():
        found: dict[str, Any] = read_json(path)
        return found
    report(Progress(len(records), len(records), 0, "repeating a part of the run"))
    checks = run_checks(runner, all_units, records)
    write_json(path, checks)
    return checks
