"""``kvgate rerun`` on a tiny model: the same bytes from the record alone, or the first difference."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from tiny_model import save_tiny_model

from kvgate.cli.main import main
from kvgate.evals.leaderboard.differences import differences
from kvgate.evals.leaderboard.evidence import RERUN, attached
from kvgate.evals.log.names import LEADERBOARD, MANIFEST, SAMPLES
from kvgate.evals.log.run_folder import write_seal

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


def moved(path: Path) -> None:
    """As if the run had been made on a processor with one more instruction set."""
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["provenance"]["machine"]["instruction_sets"].append("amx_fp64")
    (path / MANIFEST).write_text(json.dumps(manifest))
    write_seal(path)
    rebuild(path)


def test_on_another_processor_scores_and_verdicts_count_and_bytes_do_not(copy: Path, capsys: Any) -> None:
    moved(copy)
    assert main(["rerun", str(copy), "--policy", LABEL, "--all"]) == 0
    said = capsys.readouterr().out
    assert "another machine, so scores and verdicts are compared: instruction_sets was" in said
    assert "14 cells of 4 batches made again: 0 answers and 0 scores differ" in said
    place = next(i for i, row in enumerate(rows(copy)) if row["label"] == LABEL)
    row = rows(copy)[place]
    change(copy, place, turns=[{**row["turns"][0], "tokens": [*row["turns"][0]["tokens"][:-1], 3]}])
    assert main(["rerun", str(copy), "--policy", LABEL, "--all"]) == 0
    assert "1 answers and 0 scores differ" in capsys.readouterr().out
    change(copy, place, score=1.0 - row["score"])
    assert main(["rerun", str(copy), "--policy", LABEL, "--all"]) == 1
    said = capsys.readouterr().out
    assert "1 answers and 1 scores differ" in said
    assert (
        f"{LABEL}: retrieval/single/{row['index']} at 400, {LABEL}: score was {1.0 - row['score']}, is {row['score']}"
        in said
    )


def test_a_verdict_that_would_change_is_told(copy: Path, capsys: Any) -> None:
    """Every answer of the recorded row is cut, which makes it invalid; those made again are not."""
    moved(copy)
    lines = [{**row, "nan": True} if row["label"] == LABEL else row for row in rows(copy)]
    (copy / SAMPLES).write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_seal(copy)
    rebuild(copy)
    assert main(["rerun", str(copy), "--policy", LABEL, "--all"]) == 1
    assert f"{LABEL}: {LABEL} (whole_prompt): verdict was invalid, is" in capsys.readouterr().out


@pytest.mark.slow
def test_a_path_through_other_instructions_for_real(done: Path) -> None:
    """The libraries are told to leave out what the run was made with, as a lesser processor would."""
    lesser = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    settings = {**os.environ, **lesser}
    command = [sys.executable, "-m", "kvgate", "rerun", str(done), "--policy", LABEL, "--all"]
    found = subprocess.run(command, env=settings, capture_output=True, text=True)
    assert found.returncode in (0, 1), found.stderr
    assert "another machine, so scores and verdicts are compared: matrix_products was" in found.stdout
    assert "14 cells of 4 batches made again: " in found.stdout


def test_a_random_share_is_evidence(copy: Path, capsys: Any) -> None:
    assert main(["rerun", str(copy), "--share", "0.3", "--seed", "5", "--attach"]) == 0
    said = capsys.readouterr().out
    assert "share 0.3 of all rows, seed 5: " in said
    assert "all as recorded\n" in said
    evidence = json.loads((copy / RERUN).read_text())
    jsonschema.validate(evidence, json.loads((files("kvgate") / "configs/schemas/rerun.schema.json").read_text()))
    assert evidence["batches"] == 2
    assert (evidence["answers"], evidence["scores"], evidence["same_machine"]) == (0, 0, True)
    assert attached(copy, evidence["head"]) is not None
    assert attached(copy, "0" * 64) is None, "of another run"


def test_made_up_answers_are_found_by_the_share_that_meets_them(copy: Path, capsys: Any) -> None:
    """Whoever makes up whole answers and seals them again passes `kvgate verify`; the model does not repeat them."""
    place = next(i for i, row in enumerate(rows(copy)) if row["label"] == LABEL and row["suite"] == "retrieval")
    row = rows(copy)[place]
    tokens = [65, 66, 67]
    change(copy, place, output_tokens=3, turns=[{**row["turns"][0], "tokens": tokens, "text": "bcd", "capped": False}])
    assert main(["rerun", str(copy), "--share", "1", "--attach"]) == 1
    assert f"retrieval/single/{row['index']} at 400, {LABEL}: output_tokens was 3" in capsys.readouterr().out
    assert json.loads((copy / RERUN).read_text())["answers"] == 1


@pytest.mark.parametrize(
    "words, says",
    [
        ([], "--policy: name the row"),
        (["--policy", LABEL, "--seed", "3"], "belong to --share"),
        (["--share", "0"], "--share: 0 is not from"),
        (["--share", "0.5", "--attach", "--policy", LABEL], "drawn from all rows"),
        (["--share", "0.5", "--all"], "not allowed with"),
    ],
)
def test_options_that_do_not_go_together(done: Path, capsys: Any, words: list[str], says: str) -> None:
    assert main(["rerun", str(done), *words]) == 2
    assert says in capsys.readouterr().err
