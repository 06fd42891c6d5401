"""Canaries: only for enabled rows, only inside what was tested. The answers are made up; all around them is real."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from made_run import MadeRun, edit_samples
from tiny_model import save_tiny_model

from kvgate.cli.main import main
from kvgate.evals.leaderboard.evidence import RerunRecord, attach
from kvgate.evals.leaderboard.finished import load_run
from kvgate.evals.log.names import CHECKS, LEADERBOARD
from kvgate.evals.log.records import CellRecord
from kvgate.evals.log.seal import require_sealed
from kvgate.serving.canary.settings import load_canary


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    return MadeRun(save_tiny_model(tmp_path_factory.mktemp("canary") / "model"))


def statuses(folder: Path, capsys: Any, *more: str) -> dict[str, str]:
    main(["gate", str(folder), "--json", *more])
    return {row["label"]: row["status"] for row in json.loads(capsys.readouterr().out)["rows"]}


def test_an_enabled_policy_gets_a_shadow_canary_within_its_scope(made: MadeRun, tmp_path: Path, capsys: Any) -> None:
    run = made.save(tmp_path / "run", {0.5: 0, 0.25: 30})
    assert statuses(run, capsys) == {"h2o@0.5": "enable", "h2o@0.25": "block"}
    assert main(["canary", str(run), "--policy", "h2o@0.5", "--out", str(tmp_path / "out")]) == 0
    path = Path(capsys.readouterr().out.strip())
    config = yaml.safe_load(path.read_text())
    jsonschema.validate(config, json.loads((files("kvgate") / "configs/schemas/canary.schema.json").read_text()))
    server = load_canary(path)
    assert (server.label, server.judge.shadow_only, server.policy(101).budget) == ("h2o@0.5", True, 50)
    assert config["mode"] == "shadow"
    assert config["traffic_fraction"] == 0.0
    assert config["policy"]["name"] == "h2o"
    assert config["policy"]["budget"] == {"ratio": 0.5}
    assert config["scope"]["longest_tokens"] == 400
    assert config["scope"]["model"]["weights_hash"] == made.loaded.info.weights_hash
    assert config["evidence"]["verified"] == {"items": 40, "cells": 120}
    assert config["evidence"]["seal"] == require_sealed(run).head
    assert config["analysis"]["on_missing_data"] == config["analysis"]["on_nan"] == "pause"


def test_a_blocked_one_gets_none_and_hears_why(made: MadeRun, tmp_path: Path, capsys: Any) -> None:
    run = made.save(tmp_path, {0.25: 30})
    assert main(["canary", str(run), "--policy", "h2o@0.25"]) == 1
    assert "is block: " in capsys.readouterr().err
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("gate", ["production", "strict"])
def test_few_items_without_any_loss_do_not_pass_a_stricter_gate(
    made: MadeRun, tmp_path: Path, capsys: Any, gate: str
) -> None:
    run = made.save(tmp_path, {0.5: 0})
    assert statuses(run, capsys, "--gate", gate) == {"h2o@0.5": "inconclusive"}
    assert main(["canary", str(run), "--policy", "h2o@0.5", "--gate", gate]) == 1


def test_a_run_whose_repetition_differs_enables_nothing(made: MadeRun, tmp_path: Path, capsys: Any) -> None:
    assert statuses(made.save(tmp_path, {0.5: 0}, different=1), capsys) == {"h2o@0.5": "invalid"}


def test_a_policy_that_answers_differently_when_repeated_is_invalid_and_the_others_are_not(
    made: MadeRun, tmp_path: Path, capsys: Any
) -> None:
    run = made.save(tmp_path, {0.5: 0, 0.25: 0}, **{"h2o@0.25": {"cells": 4, "different": 1}})
    assert statuses(run, capsys) == {"h2o@0.5": "enable", "h2o@0.25": "invalid"}


def test_a_policy_that_evicted_nothing_enables_nothing(made: MadeRun, tmp_path: Path, capsys: Any) -> None:
    run = made.save(tmp_path, {0.5: 0})
    edit_samples(run, lambda rows: [{**row, "evicted_tokens": 0.0} for row in rows])
    assert statuses(run, capsys) == {"h2o@0.5": "invalid"}


def test_what_the_model_answered_again_is_part_of_the_evidence(made: MadeRun, tmp_path: Path, capsys: Any) -> None:
    """The answers are made up, so that a true share would differ; what is attached is made up as well."""
    run = made.save(tmp_path / "run", {0.5: 0})
    share = RerunRecord(require_sealed(run).head, 0.05, 7, 1, 6, 0, 0, (), "a" * 32, "b" * 32, {}, True)
    attach(run, share)
    assert main(["canary", str(run), "--policy", "h2o@0.5", "--out", str(tmp_path / "out")]) == 0
    config = yaml.safe_load(Path(capsys.readouterr().out.strip()).read_text())
    assert config["evidence"]["rerun"] == {"share": 0.05, "cells": 6, "answers": 0, "scores": 0, "same_machine": True}
    attach(run, replace(share, answers=2))
    assert main(["canary", str(run), "--policy", "h2o@0.5", "--out", str(tmp_path / "out")]) == 1
    assert "cells made again came out differently" in capsys.readouterr().err
    attach(run, replace(share, answers=2, same_machine=False))
    assert main(["canary", str(run), "--policy", "h2o@0.5", "--out", str(tmp_path / "out")]) == 0


def test_unknown_rows_and_unfinished_runs_are_bad_input(made: MadeRun, tmp_path: Path, capsys: Any) -> None:
    run = made.save(tmp_path, {0.5: 0})
    assert main(["canary", str(run), "--policy", "h2o@0.9"]) == 2
    assert "h2o@0.5" in capsys.readouterr().err
    (run / CHECKS).unlink()
    assert main(["canary", str(run), "--policy", "h2o@0.5"]) == 2
    assert main(["show", str(run)]) == 2
    assert LEADERBOARD in capsys.readouterr().err


def test_records_survive_their_own_format(made: MadeRun, tmp_path: Path) -> None:
    for record in load_run(made.save(tmp_path, {0.5: 3}, items=4)).records:
        assert CellRecord.from_json(record.to_json()) == record
