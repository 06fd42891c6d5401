"""The main job: a prepared plan in, results folder out. Resumable; the same plan ends with the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvgate.evals.judge.gates import load_gate
from kvgate.evals.leaderboard.finished import FinishedRun, oracle_reasons
from kvgate.evals.log.names import CHECKS, LEADERBOARD, MANIFEST, STOP
from kvgate.evals.log.records import CellRecord
from kvgate.evals.log.run_folder import RunFolder, read_json, write_json, write_seal
from kvgate.evals.plan.cells import Shard
from kvgate.evals.run.early_stopping import EarlyStopping
from kvgate.evals.run.prepare import Prepared, make_engine
from kvgate.evals.run.runner import Runner
from kvgate.evals.run.self_checks import run_checks


@dataclass(frozen=True)
class Progress:
    """Told after every shard. ``done`` and ``total`` count cells; ``fresh`` those of them run by this process."""

    done: int
    total: int
    fresh: int
    note: str


def execute(
    prepared: Prepared, out: Path, report: Callable[[Progress], None] = lambda progress: None
) -> dict[str, Any]:
    """Run what is not there yet, then check, seal and judge. Returns the leaderboard, also written to ``out``.

    ValueError where ``out`` holds another run, is in use by another process, or takes no more.
    """
    with RunFolder(out, prepared.manifest) as folder:
        return _executed(prepared, folder, report)


def _executed(prepared: Prepared, folder: RunFolder, report: Callable[[Progress], None]) -> dict[str, Any]:
    records = folder.resume([[cell.cell_id for cell in shard.cells] for shard in prepared.shards])
    runner = Runner(make_engine(prepared), prepared.loaded.tokenizer, prepared.manifest["config_hash"])
    total = sum(len(shard.cells) for shard in prepared.shards)
    resumed = len(records)
    report(Progress(resumed, total, 0, "resumed" if resumed else "started"))
    stopping = _early_stopping(prepared, folder)
    ran: list[Shard] = []
    at = 0
    for batch in prepared.batches:
        if stopping is not None and stopping.over(batch):
            break
        start, before = at, len(records)
        for shard in batch:
            if at == len(records):
                made = runner.run(shard)
                folder.append(made)
                records += made
                first = shard.items[0]
                report(Progress(len(records), total, len(records) - resumed, f"{first.suite} {first.length}"))
            at += len(shard.cells)
            ran.append(shard)
        if stopping is not None and stopping.look(batch, records[start:at], fresh=len(records) > before):
            break
    if stopping is not None:
        write_json(folder.path / STOP, stopping.stop)
    checks = _checks(folder, runner, ran, records, report)
    write_seal(folder.path)
    manifest = read_json(folder.path / MANIFEST)
    finished = FinishedRun(folder.path, manifest, tuple(records), checks, stopping.stop if stopping else None)
    leaderboard = finished.leaderboard()
    write_json(folder.path / LEADERBOARD, leaderboard)
    return leaderboard


def _early_stopping(prepared: Prepared, folder: RunFolder) -> EarlyStopping | None:
    config = prepared.config
    if config.until_decided is None:
        return None
    declared = oracle_reasons(read_json(folder.path / MANIFEST))
    stopped = read_json(folder.path / STOP) if (folder.path / STOP).exists() else None
    order = [item.item_hash for shard in prepared.shards for item in shard.items]
    gate = load_gate(config.gate)
    return EarlyStopping(gate, config.until_decided, order, declared, stopped, config.primary, config.page_size)


def _checks(
    folder: RunFolder,
    runner: Runner,
    all_shards: Sequence[Shard],
    records: Sequence[CellRecord],
    report: Callable[[Progress], None],
) -> dict[str, Any]:
    path = folder.path / CHECKS
    if path.exists():
        found: dict[str, Any] = read_json(path)
        return found
    report(Progress(len(records), len(records), 0, "repeating a part of the run"))
    checks = run_checks(runner, all_shards, records)
    write_json(path, checks)
    return checks
