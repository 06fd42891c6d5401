"""Canaries: only for enabled rows, only inside what was tested. The records are made up; the path is the real one."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from kvgate.cli.main import main
from kvgate.evals.log.records import CellRecord, TurnRecord
from kvgate.evals.log.run_folder import CHECKS, LEADERBOARD, MANIFEST, SAMPLES, write_json, write_seal

CONFIG = "a" * 32
MODEL = {
    "name": "embedded", "revision": "local", "model_type": "llama", "weights_hash": "b" * 32, "dtype": "bfloat16",
    "device": "cpu", "layers": 2, "query_heads": 2, "kv_heads": 1, "head_dim": 8, "native_windows": [None, None],
    "max_positions": 4096, "stop_ids": [2], "rotates_halves": True,
}  # fmt: skip
MANIFEST_DATA = {
    "schema_version": 2,
    "config_hash": CONFIG,
    "items": 40,
    "plan": {
        "name": "made_up", "gate": "screen", "seed": 0, "model": "embedded",
        "suites": [{"name": "retrieval", "counts": {"512": 40}}],
        "policies": [{"policy": "h2o", "budgets": [0.5, 0.25]}],
    },
    "provenance": {
        "kvgate": "0.1.0", "code_hash": "c" * 32, "git": {"revision": "d" * 40, "dirty": False}, "python": "3.11",
        "packages": {}, "model": MODEL, "machine": {},
    },
}  # fmt: skip


def cell(index: int, score: float, label: str = "full", ratio: float | None = None) -> CellRecord:
    policy, budget = ("h2o", int(512 * ratio)) if ratio else ("full", None)
    turn = TurnRecord("q", score, (5, 6), "x", capped=False)
    return CellRecord(
        cell_id=f"{index:016x}{label.encode().hex():0>16}"[-32:], config_hash=CONFIG, suite="retrieval", task="single",
        index=index, length=512, depth=(index % 5) / 5, cluster=f"c{index}", item_hash=f"{index:032x}",
        context_hash=f"{index + 1000:032x}", protocol="question_unseen", policy=policy, label=label,
        params={"heavy": 1, "recent": 1} if ratio else {}, budget=budget, ratio=ratio, score=score, turns=(turn,),
        evicted_tokens=100.0 if ratio else 0.0, native=False, covered=False, floored=False, resident_bytes=500,
        logical_bytes=400, exact_resident_bytes=1000, context_tokens=512, output_tokens=2, nan=False,
    )  # fmt: skip


def save(folder: Path, losses: dict[float, int], items: int = 40, different: int = 0, **repeat: Any) -> Path:
    records = [cell(index, 1.0) for index in range(items)]
    for ratio, lost in losses.items():
        records += [cell(index, float(index >= lost), f"h2o@{ratio}", ratio) for index in range(items)]
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / MANIFEST, MANIFEST_DATA)
    write_json(folder / CHECKS, {
        "schema_version": 2, "units": [0], "repeat": {"full": {"cells": 4, "different": different}, **repeat},
        "batch_invariance": {"cells": 4, "different": 0},
    })  # fmt: skip
    (folder / SAMPLES).write_text("".join(record.to_json() + "\n" for record in records))
    write_seal(folder)
    return folder


def statuses(folder: Path, capsys: Any, *more: str) -> dict[str, str]:
    main(["gate", str(folder), "--json", *more])
    return {row["label"]: row["status"] for row in json.loads(capsys.readouterr().out)["rows"]}


def test_an_enabled_policy_gets_a_shadow_canary_within_its_scope(tmp_path: Path, capsys: Any) -> None:
    run = save(tmp_path / "run", {0.5: 0, 0.25: 30})
    assert statuses(run, capsys) == {"h2o@0.5": "enable", "h2o@0.25": "block"}
    assert main(["canary", str(run), "--policy", "h2o@0.5", "--out", str(tmp_path / "out")]) == 0
    path = Path(capsys.readouterr().out.strip())
    config = yaml.safe_load(path.read_text())
    jsonschema.validate(config, json.loads((files("kvgate") / "configs/schemas/canary.schema.json").read_text()))
    assert config["mode"] == "shadow"
    assert config["traffic_fraction"] == 0.0
    assert config["policy"] == {"name": "h2o", "params": {"heavy": 1, "recent": 1}, "budget": {"ratio": 0.5}}
    assert config["scope"]["longest_tokens"] == 512
    assert config["scope"]["model"]["weights_hash"] == "b" * 32
    assert config["analysis"]["on_missing_data"] == config["analysis"]["on_nan"] == "pause"


def test_a_blocked_one_gets_none_and_hears_why(tmp_path: Path, capsys: Any) -> None:
    run = save(tmp_path, {0.25: 30})
    assert main(["canary", str(run), "--policy", "h2o@0.25"]) == 1
    assert "is block: " in capsys.readouterr().err
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("gate", ["production", "strict"])
def test_few_items_without_any_loss_do_not_pass_a_stricter_gate(tmp_path: Path, capsys: Any, gate: str) -> None:
    run = save(tmp_path, {0.5: 0})
    assert statuses(run, capsys, "--gate", gate) == {"h2o@0.5": "inconclusive"}
    assert main(["canary", str(run), "--policy", "h2o@0.5", "--gate", gate]) == 1


def test_a_run_whose_repetition_differs_enables_nothing(tmp_path: Path, capsys: Any) -> None:
    assert statuses(save(tmp_path, {0.5: 0}, different=1), capsys) == {"h2o@0.5": "invalid"}


def test_a_policy_that_answers_differently_when_repeated_is_invalid_and_the_others_are_not(
    tmp_path: Path, capsys: Any
) -> None:
    run = save(tmp_path, {0.5: 0, 0.25: 0}, **{"h2o@0.25": {"cells": 4, "different": 1}})
    assert statuses(run, capsys) == {"h2o@0.5": "enable", "h2o@0.25": "invalid"}


def test_a_policy_that_evicted_nothing_enables_nothing(tmp_path: Path, capsys: Any) -> None:
    run = save(tmp_path, {0.5: 0})
    lines = [json.loads(line) for line in (run / SAMPLES).read_text().splitlines()]
    text = "".join(json.dumps({**line, "evicted_tokens": 0.0}) + "\n" for line in lines)
    (run / SAMPLES).write_text(text)
    write_seal(run)
    assert statuses(run, capsys) == {"h2o@0.5": "invalid"}


def test_unknown_rows_and_unfinished_runs_are_bad_input(tmp_path: Path, capsys: Any) -> None:
    run = save(tmp_path, {0.5: 0})
    assert main(["canary", str(run), "--policy", "h2o@0.9"]) == 2
    assert "h2o@0.5" in capsys.readouterr().err
    (run / CHECKS).unlink()
    assert main(["canary", str(run), "--policy", "h2o@0.5"]) == 2
    assert main(["show", str(run)]) == 2
    assert LEADERBOARD in capsys.readouterr().err


def test_records_survive_their_own_format() -> None:
    record = replace(cell(3, 1.0, "h2o@0.5", 0.5), depth=0.25)
    assert CellRecord.from_json(record.to_json()) == record
