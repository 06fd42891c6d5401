"""``kvgate verify`` and ``kvgate canary`` against forgers who edit by hand or seal again: none gets a canary."""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from made_run import MadeRun, edit_manifest, edit_samples
from tiny_model import save_tiny_model

from kvgate.cli.main import main
from kvgate.evals.log.names import CHECKS, MANIFEST, SAMPLES
from kvgate.evals.log.records import SCHEMA_VERSION
from kvgate.evals.log.run_folder import write_json, write_seal

ROOT = Path(__file__).resolve().parents[2]
LOST = 30  # of 40 items that the policy gets wrong
LABEL = "h2o@0.25"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    return MadeRun(save_tiny_model(tmp_path_factory.mktemp("verify") / "model"))


@pytest.fixture(scope="module")
def blocked(made: MadeRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.save(tmp_path_factory.mktemp("blocked"), {0.25: LOST})


@pytest.fixture
def copy(blocked: Path, tmp_path: Path) -> Path:
    shutil.copytree(blocked, tmp_path / "copy")
    return tmp_path / "copy"


def test_an_honest_run_passes(blocked: Path, capsys: Any) -> None:
    assert main(["verify", str(blocked)]) == 0
    assert "40 items built and 80 answers scored again, all as recorded" in capsys.readouterr().out
    assert main(["verify", str(blocked), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"] is True


def better(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every score 1, whatever the answer."""
    return [
        {**row, "score": 1.0, "turns": [{**turn, "score": 1.0} for turn in row["turns"]]}
        if row["label"] == LABEL
        else row
        for row in rows
    ]


def better_text(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """And the exact run's words, but not its tokens."""
    exact = {row["item_hash"]: row["turns"][0]["text"] for row in rows if row["label"] == "full"}
    return [
        {**row, "turns": [{**turn, "text": exact[row["item_hash"]]} for turn in row["turns"]]} for row in better(rows)
    ]


def dropped(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lost items left out on both sides."""
    lost = {row["item_hash"] for row in rows if row["score"] == 0.0}
    kept = [row for row in rows if row["item_hash"] not in lost]
    assert len(kept) == 2 * (40 - LOST)
    return kept


def renamed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The exact run's answers under the policy's name."""
    exact = {row["item_hash"]: row for row in rows if row["label"] == "full"}
    return [
        {**row, "turns": exact[row["item_hash"]]["turns"], "score": 1.0, "budget": 399, "ratio": 0.99}
        if row["label"] == LABEL
        else row
        for row in rows
    ]


@pytest.mark.parametrize(
    "change, says",
    [(better, "score is 1.0, scored again it is 0.0"), (better_text, "its text"), (renamed, "ratio is 0.99")],
    ids=["scores", "words", "budget"],
)
def test_edited_answers(copy: Path, capsys: Any, change: Callable[..., Any], says: str) -> None:
    edit_samples(copy, change)
    assert main(["verify", str(copy)]) == 1
    said = capsys.readouterr().out
    assert says.replace("its text", "text is") in said
    assert main(["canary", str(copy), "--policy", LABEL]) == 1
    assert "does not pass `kvgate verify`" in capsys.readouterr().err
    assert not (copy / "canary").exists()


def test_dropped_items_with_the_count_lowered(copy: Path, capsys: Any) -> None:
    edit_samples(copy, dropped)
    edit_manifest(copy, lambda manifest: manifest.update(items=40 - LOST))
    assert main(["verify", str(copy)]) == 1
    said = capsys.readouterr().out
    assert "items is 10, the plan makes 40" in said
    assert "samples.jsonl has 20 cells, the plan makes 80" in said


def test_dropped_items_with_the_plan_asking_for_fewer(copy: Path, capsys: Any) -> None:
    """The plan as it would have been: its config hash, and with it every cell, is another."""
    edit_samples(copy, lambda rows: [row for row in rows if row["index"] >= LOST])

    def fewer(manifest: dict[str, Any]) -> None:
        manifest["plan"]["suites"][0]["counts"] = {"400": 40 - LOST}
        manifest["items"] = 40 - LOST

    edit_manifest(copy, fewer)
    assert main(["verify", str(copy)]) == 1
    assert "config_hash is" in capsys.readouterr().out
    assert main(["canary", str(copy), "--policy", LABEL]) == 1


def other_model(manifest: dict[str, Any]) -> None:
    manifest["provenance"]["model"].update(name="meta-llama/Llama-3-8B", weights_hash="f" * 32)


def other_identity(manifest: dict[str, Any]) -> None:
    other_model(manifest)
    manifest["identity"]["weights_hash"] = "f" * 32


def other_config(manifest: dict[str, Any]) -> None:
    manifest["config_hash"] = "e" * 32


def other_stop(manifest: dict[str, Any]) -> None:
    manifest["identity"]["stop_ids"] = [1, 2]


def other_date(manifest: dict[str, Any]) -> None:
    manifest["plan"]["date"] = "2031-01-01"


def other_request(manifest: dict[str, Any]) -> None:
    manifest["columns"][1].update(request=0.5, oracle=False)


@pytest.mark.parametrize(
    "change, says",
    [
        (other_model, "model weights_hash is ffff"),
        (other_identity, "have the hash"),
        (other_config, "config_hash"),
        (other_stop, "stop_ids"),
        (other_date, "config_hash is"),
        (other_request, "columns is"),
    ],
)
@pytest.mark.parametrize("sealed", [False, True], ids=["by hand", "sealed again"])
def test_edited_manifests(made: MadeRun, tmp_path: Path, capsys: Any, change: Any, says: str, sealed: bool) -> None:
    """The policy loses nothing here, so that only the manifest stands between the forger and a canary."""
    run = made.save(tmp_path / "run", {0.25: 0})
    if sealed:
        edit_manifest(run, change)
        if change is other_config:
            edit_samples(run, lambda rows: [{**row, "config_hash": "e" * 32} for row in rows])
        assert main(["verify", str(run)]) == 1
        assert says in capsys.readouterr().out
    else:
        manifest = json.loads((run / MANIFEST).read_text())
        change(manifest)
        write_json(run / MANIFEST, manifest)
        for command in ("verify", "gate"):
            assert main([command, str(run)]) == 2
            assert ("not as it was" if change is not other_config else "do not belong") in capsys.readouterr().err
    assert main(["canary", str(run), "--policy", LABEL]) == (1 if sealed else 2)
    assert not (run / "canary").exists()


def test_repetition_that_was_made_to_agree(made: MadeRun, tmp_path: Path, capsys: Any) -> None:
    run = made.save(tmp_path, {0.25: 0}, different=3)
    checks = json.loads((run / CHECKS).read_text())
    checks["repeat"]["full"]["different"] = 0
    write_json(run / CHECKS, checks)
    assert main(["canary", str(run), "--policy", LABEL]) == 2
    assert "checks.json or stop.json was changed" in capsys.readouterr().err


def test_a_single_score_edited_by_hand_is_refused_by_every_reader(copy: Path, capsys: Any) -> None:
    text = (copy / SAMPLES).read_text()
    (copy / SAMPLES).write_text(text.replace('"score":0.0', '"score":1.0', 1))
    for command in (["gate"], ["verify"], ["report"], ["canary", "--policy", LABEL], ["rerun", "--policy", LABEL]):
        assert main([command[0], str(copy), *command[1:]]) == 2
        assert "from 1 to 80 was changed" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("folder", sorted((ROOT / "results").glob("reference*")), ids=lambda path: path.name)
def test_the_committed_runs_verify(folder: Path, capsys: Any) -> None:
    """Under the Python version that made them: suites take their texts from its documentation."""
    origin = json.loads((folder / MANIFEST).read_text())
    if origin["schema_version"] != SCHEMA_VERSION:
        pytest.skip(f"{folder.name} is of schema {origin['schema_version']}: it has to be made again")
    if origin["provenance"]["python"] != platform.python_version():
        pytest.skip(f"{folder.name} was made under Python {origin['provenance']['python']}")
    assert main(["verify", str(folder)]) == 0
    assert "all as recorded" in capsys.readouterr().out


@pytest.mark.slow
def test_every_kind_of_answer_is_scored_again(made: MadeRun, tmp_path: Path, capsys: Any) -> None:
    """A real run of all suites; then one figure of each kind of record is edited and found."""
    plan = {
        "model": str(made.model), "dtype": "float32", "policies": [{"use": "h2o", "budgets": [0.25]}],
        "suites": [
            {"name": "retrieval", "counts": {600: 1}}, {"name": "multi_turn", "counts": {1400: 1}},
            {"name": "code", "counts": {800: 1}}, {"name": "instructions", "counts": {1200: 1}},
            {"name": "fidelity", "counts": {400: 2}, "tasks": ["continue"], "options": {"new_tokens": 6}},
        ],
    }  # fmt: skip
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    assert main(["run", "--plan", str(tmp_path / "plan.yaml"), "--out", str(tmp_path / "run"), "--json"]) == 0
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "run")]) == 0
    assert "all as recorded" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "run" / SAMPLES).read_text().splitlines()]
    for kind in ("fidelity", "candidate_scores"):
        place = next(place for place, row in enumerate(rows) if row["turns"][0][kind] is not None)
        turn = rows[place]["turns"][0]
        changed = {**turn[kind], "kl": turn[kind]["kl"][1:]} if kind == "fidelity" else turn[kind][::-1]
        edited = {**rows[place], "turns": [{**turn, kind: changed}, *rows[place]["turns"][1:]]}
        made_up = [*rows[:place], edited, *rows[place + 1 :]]
        edit_samples(tmp_path / "run", lambda _, made_up=made_up: made_up)  # type: ignore[misc]
        assert main(["verify", str(tmp_path / "run")]) == 1
        assert rows[place]["suite"] in capsys.readouterr().out
    edit_samples(tmp_path / "run", lambda found: rows)
    write_seal(tmp_path / "run")
    assert main(["verify", str(tmp_path / "run")]) == 0
