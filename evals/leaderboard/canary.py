"""Canary configs: what a rollout tool is told, for enabled policies of verified runs, only inside what was tested."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from kvgate.evals.leaderboard.board import samples_hash
from kvgate.evals.leaderboard.evidence import RERUN, RerunRecord, attached
from kvgate.evals.leaderboard.finished import FinishedRun
from kvgate.evals.leaderboard.rollout import Rollout
from kvgate.evals.log.records import SCHEMA_VERSION
from kvgate.evals.log.run_folder import write_text, writing
from kvgate.evals.log.verification import Verification

Verify = Callable[[FinishedRun], Verification]


class NotEnabled(Exception):
    """The verdict does not allow a canary; the message says why."""


def canary_config(
    run: FinishedRun, label: str, verify: Verify, protocol: str | None = None, gate: str | None = None
) -> dict[str, Any]:
    """The canary of one row. Raises NotEnabled with the verdict's or the verification's reasons, ValueError for an
    unknown row.

    The verdict is made again from the samples; a leaderboard file that says otherwise changes nothing. ``verify``
    builds the run's items and scores its answers again, so that records which say otherwise change nothing either.
    """
    board = run.leaderboard(gate)
    rows = [row for row in board["rows"] if row["label"] == label and protocol in (None, row["protocol"])]
    if not rows:
        known = ", ".join(sorted({row["label"] for row in board["rows"]}))
        raise ValueError(f"policy {label!r}: not in this run; it has {known}")
    refused = [row for row in rows if row["status"] != "enable"]
    if refused:
        raise NotEnabled("; ".join(f"{_title(row)} is {row['status']}: {_why(row)}" for row in refused))
    made_again = attached(run.path, run.head)
    if made_again is not None and not made_again.passed:
        raise NotEnabled(
            f"cells made again came out differently ({made_again.answers} answers, {made_again.scores} scores of "
            f"{made_again.cells}, see {RERUN})"
        )
    verification = verify(run)
    if not verification.passed or verification.head != run.head:
        more = f" (and {verification.more} more)" if verification.more else ""
        raise NotEnabled(f"the run does not pass `kvgate verify`: {'; '.join(verification.faults)}{more}")
    return _config(run, board, rows, verification)


def write_canary(
    run: FinishedRun, label: str, folder: Path, verify: Verify, protocol: str | None = None, gate: str | None = None
) -> Path:
    """Write the canary of one row as YAML and return its path. ValueError where it cannot be written."""
    config = canary_config(run, label, verify, protocol, gate)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{''.join(c if c.isalnum() or c in '._-' else '-' for c in label)}.yaml"
    write_text(path, yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
    return path


def _config(
    run: FinishedRun, board: Mapping[str, Any], rows: list[dict[str, Any]], verification: Verification
) -> dict[str, Any]:
    gate, model, first = board["gate"], run.manifest["provenance"]["model"], rows[0]
    shadow = gate["shadow_only"]
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "kvgate-canary",
        "policy": {
            "name": first["policy"],
            "params": _parameters(run, first["label"]),
            "budget": {"ratio": first["ratio"]} if first["ratio"] is not None else {"tokens": int(first["budget"])},
        },
        "mode": "shadow" if shadow else "canary",
        "traffic_fraction": 0.0 if shadow else gate["canary_fraction"],
        "scope": {
            "model": {key: model[key] for key in ("name", "revision", "weights_hash", "dtype")},
            "protocols": [row["protocol"] for row in rows],
            "longest_tokens": min(row["scope"]["longest_tokens"] for row in rows),
            "suites": sorted({suite for row in rows for suite in row["scope"]["suites"]}),
            "excluded": sorted({name for row in rows for name in row["scope"]["excluded"]}),
            "outside": "exact",
        },
        # An analysis without data, or with NaN, pauses: it never counts as success.
        "analysis": {
            "compare_with": "full",
            "metric": "task score of paired requests, in [0, 1]",
            "margin": gate["m_suite"],
            "alpha": gate["alpha"],
            "minimum_pairs": gate["min_items"],
            "on_loss": "roll_back",
            "on_missing_data": "pause",
            "on_nan": "pause",
        },
        "rollout": _rollout(gate),
        "evidence": {
            "run": board["name"],
            "gate": {key: gate[key] for key in ("name", "content_hash", "shipped")},
            "tried": dict(board["tried"]),
            "config_hash": board["config_hash"],
            "samples_hash": samples_hash(run.records),
            "seal": run.head,
            "verified": {"items": verification.items, "cells": verification.cells},
            "rerun": _made_again(attached(run.path, run.head)),
            "git": run.manifest["provenance"]["git"],
            "code_hash": run.manifest["provenance"]["code_hash"],
            "reasons": [reason for row in rows for reason in row["reasons"]],
        },
    }


def _made_again(found: RerunRecord | None) -> dict[str, Any] | None:
    """What the model itself confirmed, if somebody had it answer a random share again."""
    if found is None:
        return None
    names = ("share", "cells", "answers", "scores", "same_machine")
    return {name: value for name, value in asdict(found).items() if name in names}


def _parameters(run: FinishedRun, label: str) -> dict[str, Any]:
    """What the plan gave the policy beside its budget: with these it can be made again for any prompt."""
    settings = next(record.settings for record in run.records if record.label == label)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in (settings or {}).items()}


def _rollout(gate: Mapping[str, Any]) -> dict[str, Any]:
    """Plain data: stages and limits of `kvgate serve`, all of them shown so that they can be edited."""
    found = asdict(Rollout(slice_margin=gate["m_slice"], shadow_pairs=gate["min_items"]))
    return {**found, "stages": list(found["stages"])}


def _title(row: Mapping[str, Any]) -> str:
    return f"{row['label']} ({row['protocol']})"


def _why(row: Mapping[str, Any]) -> str:
    return " ".join(row["reasons"]) or "no reason recorded"
