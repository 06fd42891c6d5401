"""``kvgate rerun`` on a tiny model: the same bytes from the record alone, or the first difference."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_model import save_tiny_model

from kvgate.cli.main import main
from kvgate.evals.log.names import LEADERBOARD, MANIFEST, SAMPLES
from kvgate.evals.log.run_folder import write_seal
from kvgate.evals.run.rerun import differences

LABEL = "h2o@0.25"


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rerun")
    plan = {
        "model": str(save_tiny_model(folder / "model")), "dtype": "float32", "batch_rows": 6,
        "suites": [
            {"name": "retrieval", "counts": {400: 3}, "tasks": ["single"]},
            {"name": "fidelity", "counts": {400: 2}, "tasks": ["continue"], "options": {"new_tokens": 6}},
            {"name": "retrieval", "counts": {400: 2}, "tasks": ["single"], "protocol": "whole_prompt"},
        ],
        "policies": [{"use": "h2o", "budgets": [0.25]}, {"use": "sliding_window", "budgets": [64]}],
    }  # fmt: skip
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan))
    assert main(["run", "--plan", str(folder / "plan.yaml"), "--out", str(folder / "done"), "--json"]) == 0
    return folder / "done"


@pytest.fixture
def copy(done: Path, tmp_path: Path) -> Path:
    shutil.copytree(done, tmp_path / "copy")
    return tmp_path / "copy"


def change(path: Path, place: int, **fields: Any) -> None:
    """Edit one sample, and the leaderboard as its owner would."""
    lines = (path / SAMPLES).read_text().splitlines()
    lines[place] = json.dumps({**json.loads(lines[place]), **fields}, sort_keys=True, separators=(",", ":"))
    (path / SAMPLES).write_text("\n".join(lines) + "\n")
    rebuild(path)


def rebuild(path: Path) -> None:
    from kvgate.evals.leaderboard.finished import load_run
    from kvgate.evals.log.run_folder import write_json

    write_seal(path)
    write_json(path / LEADERBOARD, load_run(path).leaderboard())


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / SAMPLES).read_text().splitlines()]


def test_a_row_comes_out_byte_for_byte(done: Path, capsys: Any) -> None:
    before = {file.name: file.read_bytes() for file in done.iterdir()}
    assert main(["rerun", str(done), "--policy", LABEL]) == 0
    said = capsys.readouterr().out
    assert "12 cells of 3 batches made again, all as recorded; 1 more batches" in said
    assert main(["rerun", str(done), "--policy", LABEL, "--all"]) == 0
    assert "14 cells of 4 batches" in capsys.readouterr().out
    assert main(["rerun", str(done), "--policy", LABEL, "--protocol", "whole_prompt"]) == 0
    assert "4 cells of 1 batches made again, all as recorded\n" in capsys.readouterr().out
    assert main(["rerun", str(done), "--policy", LABEL, "--unit", "1"]) == 0
    assert "2 cells of 1 batches" in capsys.readouterr().out
    assert {file.name: file.read_bytes() for file in done.iterdir()} == before


@pytest.mark.parametrize("side", [LABEL, "full"])
def test_the_first_difference_is_shown(copy: Path, capsys: Any, side: str) -> None:
    place = next(i for i, row in enumerate(rows(copy)) if row["label"] == side)
    row = rows(copy)[place]
    turns = [{**row["turns"][0], "tokens": [(row["turns"][0]["tokens"] or [7])[0] + 1, *row["turns"][0]["tokens"][1:]]}]
    change(copy, place, turns=turns)
    assert main(["rerun", str(copy), "--policy", LABEL]) == 1
    said = capsys.readouterr().out
    assert f"retrieval/single/{row['index']} at 400, {side}: turns[0].tokens" in said
    assert f"was {turns[0]['tokens'][0]}, is {row['turns'][0]['tokens'][0]}" in said


def test_another_policys_cells_are_not_this_rows(copy: Path) -> None:
    place = next(i for i, row in enumerate(rows(copy)) if row["label"] == "sliding_window@64")
    change(copy, place, resident_bytes=1)
    assert main(["rerun", str(copy), "--policy", LABEL]) == 0
    assert main(["rerun", str(copy), "--policy", "sliding_window@64"]) == 1


def test_a_line_that_only_reads_the_same_is_a_difference(copy: Path, capsys: Any) -> None:
    lines = (copy / SAMPLES).read_text().splitlines()
    place = next(i for i, row in enumerate(rows(copy)) if row["label"] == LABEL)
    lines[place] = json.dumps(json.loads(lines[place]))
    (copy / SAMPLES).write_text("\n".join(lines) + "\n")
    write_seal(copy)
    assert main(["rerun", str(copy), "--policy", LABEL]) == 1
    assert "bytes of the line" in capsys.readouterr().out


def test_a_forged_leaderboard_row_is_found_without_running_anything(copy: Path, capsys: Any) -> None:
    board = json.loads((copy / LEADERBOARD).read_text())
    row = next(row for row in board["rows"] if row["label"] == LABEL and row["protocol"] == "whole_prompt")
    was, row["status"] = row["status"], "enable"
    (copy / LEADERBOARD).write_text(json.dumps(board))
    assert main(["rerun", str(copy), "--policy", LABEL]) == 1
    captured = capsys.readouterr()
    assert f'whole_prompt.status was "enable", is "{was}"' in captured.out
    assert "batch 1" not in captured.err


@pytest.mark.parametrize(
    "where, value, message",
    [
        (("code_hash",), "0" * 32, "kvgate code (code_hash) was 000"),
        (("packages", "torch"), "1.0", "torch was 1.0, is"),
        (("model", "weights_hash"), "1" * 32, "model weights_hash was 111"),
    ],
)
def test_what_cannot_be_compared_says_why_and_anyway_compares(
    copy: Path, capsys: Any, where: tuple[str, ...], value: str, message: str
) -> None:
    manifest = json.loads((copy / MANIFEST).read_text())
    at = manifest["provenance"]
    for key in where[:-1]:
        at = at[key]
    at[where[-1]] = value
    (copy / MANIFEST).write_text(json.dumps(manifest))
    write_seal(copy)
    assert main(["rerun", str(copy), "--policy", LABEL]) == 2
    assert message in capsys.readouterr().err
    assert main(["rerun", str(copy), "--policy", LABEL, "--anyway"]) == 0
    assert f"note: {message}" in capsys.readouterr().out
    change(copy, next(i for i, row in enumerate(rows(copy)) if row["label"] == LABEL), evicted_tokens=1.0)
    assert main(["rerun", str(copy), "--policy", LABEL, "--anyway"]) == 1
    assert "evicted_tokens was 1.0" in capsys.readouterr().out


def test_other_weights_are_noticed(copy: Path, capsys: Any, tmp_path: Path) -> None:
    manifest = json.loads((copy / MANIFEST).read_text())
    manifest["plan"]["model"] = str(save_tiny_model(tmp_path / "other", seed=9))
    (copy / MANIFEST).write_text(json.dumps(manifest))
    write_seal(copy)
    assert main(["rerun", str(copy), "--policy", LABEL]) == 2
    assert "model weights_hash was" in capsys.readouterr().err
    assert main(["rerun", str(copy), "--policy", LABEL, "--anyway"]) == 1


@pytest.mark.parametrize(
    "more, message",
    [
        (["--policy", "h2o@0.5"], "it has h2o@0.25 (question_unseen)"),
        (["--policy", "full"], "'full'"),
        (["--policy", LABEL, "--protocol", "multi_turn"], "no such row"),
        (["--policy", LABEL, "--unit", "99"], "--unit 99"),
    ],
)
def test_rows_that_are_not_there(done: Path, capsys: Any, more: list[str], message: str) -> None:
    assert main(["rerun", str(done), *more]) == 2
    assert message in capsys.readouterr().err


def test_lm_eval_folders_are_refused_politely(copy: Path, capsys: Any) -> None:
    manifest = json.loads((copy / MANIFEST).read_text())
    manifest["plan"]["suites"][0]["options"] = {"lm_eval": "0.4.13"}
    (copy / MANIFEST).write_text(json.dumps(manifest))
    write_seal(copy)
    assert main(["rerun", str(copy), "--policy", LABEL]) == 2
    assert "kvgate lm-eval" in capsys.readouterr().err


def test_fields_are_named_by_their_path() -> None:
    old = {"a": [{"b": 1}, 2], "c": None}
    assert list(differences(old, {"a": [{"b": 3}, 2], "c": None})) == [("a[0].b", 1, 3)]
    assert list(differences(old, {"a": [1], "c": 0.0})) == [("a", [{"b": 1}, 2], [1]), ("c", None, 0.0)]
    assert list(differences({"x": 1}, {"x": 1.0})) == [("x", 1, 1.0)]
    assert list(differences(old, old)) == []
