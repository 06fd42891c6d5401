"""Finished runs, read back and judged again. Nothing here believes a leaderboard file: verdicts come from samples."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema

from kvgate.evals.judge.gates import load_gate
from kvgate.evals.judge.order import follows
from kvgate.evals.leaderboard.board import build_leaderboard
from kvgate.evals.log.manifest import check_checks, check_manifest, check_stop
from kvgate.evals.log.records import EXACT, SCHEMA_VERSION, CellRecord
from kvgate.evals.log.run_folder import CHECKS, LEADERBOARD, MANIFEST, SAMPLES, STOP, read_json, read_samples
from kvgate.evals.log.seal import require_sealed
from kvgate.typed import is_file, is_folder


@dataclass(frozen=True)
class FinishedRun:
    """What a finished run's folder holds, all but its leaderboard.

    ``stop``: of a run that was to stop when decided, where and why it did. ``head``: of its seal.
    """

    path: Path
    manifest: Mapping[str, Any]
    records: tuple[CellRecord, ...]
    checks: Mapping[str, Any]
    stop: Mapping[str, Any] | None = None
    head: str = ""

    def leaderboard(self, gate: str | None = None) -> dict[str, Any]:
        """The leaderboard by the run's own gate, or by another."""
        chosen = load_gate(self.manifest["plan"]["gate"] if gate is None else gate)
        board = build_leaderboard(self.manifest, self.records, chosen, self.checks, oracle_reasons(self.manifest))
        return {**board, "stopped": {**self.stop, "open": list(self.stop["open"])}} if self.stop else board


def load_run(path: Path) -> FinishedRun:
    """A finished run. ValueError if a file is missing, torn, or of another run or version."""
    if not is_folder(path):
        raise ValueError(f"results folder {str(path)!r:.200}: no such folder")
    manifest, checks = read_json(path / MANIFEST), read_json(path / CHECKS)
    check_manifest(manifest, str(path / MANIFEST))
    for name in ("identity", "items_hash", "columns"):
        if manifest.get(name) is None:
            raise ValueError(f"{path / MANIFEST}: {name} is missing; restore the file or run again")
    check_checks(checks, str(path / CHECKS))
    records = tuple(read_samples(path / SAMPLES))
    foreign = [record for record in records if record.config_hash != manifest["config_hash"]]
    if foreign or not records:
        raise ValueError(f"{path / SAMPLES}: {len(foreign)} of {len(records)} samples do not belong to this run")
    stop = read_json(path / STOP) if manifest["plan"].get("until_decided") else None
    if stop is not None:
        check_stop(stop, str(path / STOP))
    _require_known(records, manifest.get("columns", ()), path / SAMPLES)
    _require_whole(records, None if stop else manifest["items"], path / SAMPLES)
    if stop is not None:
        _require_order(records, manifest.get("order", ()), stop, path / SAMPLES)
    return FinishedRun(path, manifest, records, checks, stop, require_sealed(path).head)


def _require_order(records: Sequence[CellRecord], order: Sequence[str], stop: Mapping[str, Any], path: Path) -> None:
    """ValueError unless a run that somebody looked at while it ran is a beginning of the order drawn before it.

    The hashes of the rounds are in the manifest; see :mod:`kvgate.evals.judge.order`.
    """
    came = list(dict.fromkeys(record.item_hash for record in records))
    if not follows(came, order, stop["looks"]):
        raise ValueError(
            f"{path}: its {len(came)} items are not the first {stop['looks']} rounds of the order drawn before the "
            "run; restore the file or run again"
        )


def _require_known(records: Sequence[CellRecord], columns: Sequence[Mapping[str, Any]], path: Path) -> None:
    """ValueError unless the samples are of rows that the manifest names: what judging knows of them stands there."""
    unknown = {record.label for record in records} - {column["label"] for column in columns}
    if unknown:
        raise ValueError(f"{path}: {min(unknown):.80} is no row of {MANIFEST}; restore the file or run again")


def _require_whole(records: Sequence[CellRecord], items: int | None, path: Path) -> None:
    """ValueError unless every policy has each item of the exact run once, and the exact run all ``items`` of the plan.

    Otherwise whoever leaves out the items that were lost would turn a bad policy into a good one.
    """
    sides: dict[tuple[str, str], list[str]] = {}
    for record in records:
        sides.setdefault((record.label, record.protocol), []).append(record.item_hash)
    exact = {protocol: set(found) for (label, protocol), found in sides.items() if label == EXACT}
    for (label, protocol), found in sorted(sides.items()):
        if len(found) != len(set(found)):
            raise ValueError(f"{path}: {label} ({protocol}) has an item twice; restore the file or run again")
        missing = exact.get(protocol, set()) ^ set(found)
        if missing:
            raise ValueError(
                f"{path}: {len(missing)} items of {label} ({protocol}) are on one side only, {min(missing)[:12]} first;"
                " restore the file or run again"
            )
    total = sum(map(len, exact.values()))
    if items is not None and total != items:
        raise ValueError(f"{path}: has {total} items, the plan has {items}; finish the run or restore the file")


def oracle_reasons(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Labels the plan declares as oracles, and why that makes them invalid."""
    reason = "declared an oracle: it reads what a policy may not"
    return {column["label"]: reason for column in manifest.get("columns", ()) if column["oracle"]}


def stored_leaderboard(path: Path) -> dict[str, Any]:
    """The leaderboard as written. ValueError if the run has none yet, or one that this version did not write."""
    if not is_file(path / LEADERBOARD):
        raise ValueError(f"results folder {str(path)!r:.200}: no {LEADERBOARD}; finish the run with `kvgate run`")
    board: dict[str, Any] = read_json(path / LEADERBOARD)
    version = board.get("schema_version") if isinstance(board, dict) else None
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"{path / LEADERBOARD}: schema_version {version!r:.40}, this kvgate reads {SCHEMA_VERSION}; "
            "make it again with `kvgate run` or see `kvgate gate`"
        )
    schema = json.loads((files("kvgate") / "configs" / "schemas" / "leaderboard.schema.json").read_text("utf-8"))
    try:
        jsonschema.validate(board, schema)
    except jsonschema.ValidationError as error:
        what = error.message[:160]
        raise ValueError(
            f"{path / LEADERBOARD}: {what}; make it again with `kvgate run` or see `kvgate gate`"
        ) from error
    return board
