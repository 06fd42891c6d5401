"""Leaderboards on a terminal."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import report_sample as sample
from rich.cells import cell_len
from rich.console import Console

from kvgate.cli.main import main
from kvgate.evals.report.names import printable, short_names
from kvgate.evals.report.slices import survival
from kvgate.evals.report.tables import print_leaderboard


@pytest.fixture(scope="module")
def board() -> dict[str, Any]:
    cells = [cell for cell in sample.records() if not cell.policy.startswith("mine")]
    return sample.run_of(tuple(cells)).leaderboard()


def shown(board: dict[str, Any], width: int, *, reasons: bool) -> str:
    text = io.StringIO()
    print_leaderboard(board, Console(file=text, width=width), reasons=reasons)
    return text.getvalue()


@pytest.mark.parametrize("width", [100, 150])
@pytest.mark.parametrize("reasons", [False, True])
def test_fits_and_cuts_nothing(board: dict[str, Any], width: int, reasons: bool) -> None:
    text = shown(board, width, reasons=reasons)
    assert max(cell_len(line) for line in text.splitlines()) <= width
    assert "…" not in text
    assert "streaming_llm" in text
    assert " streaming_llm(positions=rebased)@0.25, multi_turn" in text  # the label, as commands take it
    assert ("Disagreements" in text) == reasons


def test_rows_are_whole_lines_in_falling_budget(board: dict[str, Any]) -> None:
    text = shown(board, 100, reasons=False)
    rows = re.findall(r"(\d+) % multi_turn +24 +1\.00 .*(inconclusive|block|enable)", text)
    assert [budget for budget, _ in rows] == ["50", "25"]
    assert re.search(r"streaming_llm +50 %.*\n +rebased +25 %", text)


def test_a_family_of_one_line_keeps_its_mode(board: dict[str, Any]) -> None:
    rows = [row for row in board["rows"] if row["ratio"] == 0.5 and row["protocol"] == "multi_turn"]
    text = shown({**board, "rows": rows, "grids": {}}, 100, reasons=False)
    assert re.search(r"streaming_llm +50 % .*\n +rebased", text)


def test_grid_and_survival_have_their_numbers(board: dict[str, Any]) -> None:
    text = shown(board, 100, reasons=True)
    assert re.search(
        r"retrieval: score in percent.*?\n(?:.*\n){4,8}? streaming_llm rebased +50 % +0 +100 +100 +0 .*\n"
        r" +0–60 +40–100 +40–100 +0–60 ",  # of four items
        text,
    )
    assert re.search(
        r"multi_turn: percent of the exact run.*?\n(?:.*\n){4,6}? streaming_llm rebased +50 % +67 +100", text
    )
    assert "evidence still attended: 25 % of 2 tokens" in text


def test_long_answers_show_their_drift_in_text_and_report(board: dict[str, Any]) -> None:
    assert "long answers" not in shown(board, 100, reasons=True)
    cells = [
        replace(cell, turns=tuple(replace(turn, tokens=tokens) for turn in cell.turns))
        for cell in sample.records()
        for tokens in [tuple(range(100)) if cell.exact else (7,) * 50]
        if not cell.policy.startswith("mine")
    ]
    long = sample.run_of(tuple(cells)).leaderboard()
    assert all(row["drift"] for row in long["rows"])
    text = shown(long, 100, reasons=True)
    assert "long answers, full KV -> policy" in text
    assert re.search(r" 50 % +\w+ +\w+ +\d+ +(\d+) +100 -> 50 +0\.00 -> 0\.98 +0 -> \1", text)
    page = survival(long, short_names(long["rows"]))
    assert "<td>50<small>/100</small></td><td>0.98<small>/0.00</small></td>" in page
    assert "answers that end in one" not in survival(board, short_names(board["rows"]))


def test_model_output_cannot_draw_on_the_terminal(board: dict[str, Any]) -> None:
    text = shown(board, 120, reasons=True)
    assert not re.search("[\x00-\x09\x0b-\x1f\u202e]", text)
    assert "\\x1b[31m\\u202e" in text


def test_show_reads_a_stored_board_and_refuses_a_damaged_one(
    board: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(tmp_path)]) == 2
    assert "no leaderboard.json" in capsys.readouterr().err
    path = tmp_path / "leaderboard.json"
    path.write_text(json.dumps(board))
    assert main(["show", str(tmp_path)]) == 0
    assert "Disagreements" in capsys.readouterr().out
    path.write_text(json.dumps({key: value for key, value in board.items() if key != "rows"}))
    assert main(["show", str(tmp_path)]) == 2
    assert "'rows' is a required property" in capsys.readouterr().err
    path.write_text("[]")
    assert main(["show", str(tmp_path)]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_reader_that_stops_early_is_no_gate_not_passed(
    board: dict[str, Any], tmp_path: Path, options: list[str], unbuffered: str
) -> None:
    """As in ``kvgate show DIR | head -1``."""
    (tmp_path / "leaderboard.json").write_text(json.dumps(board))
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "kvgate", "show", str(tmp_path), *options]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=environment, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("columns, width", [("104", 104), ("", 150), ("wide", 150), ("0", 150), (None, 150)])
def test_a_pipe_is_as_wide_as_columns_says(
    board: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    columns: str | None,
    width: int,
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    (tmp_path / "leaderboard.json").write_text(json.dumps(board))
    assert main(["show", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(cell_len, lines)) <= width
    assert any(cell_len(line) > width - 20 for line in lines)  # and the room is used


def test_printable() -> None:
    assert printable("a\nb\tc\x00é€ \u2066") == "a⏎b\\x09c\\x00é€ \\u2066"


def test_short_names() -> None:
    def row(label: str, ratio: float | None = 0.5, budget: float = 512) -> dict[str, Any]:
        return {"label": label, "ratio": ratio, "budget": budget}

    rows = [
        row("h2o@0.5"),
        row("h2o@512", None),
        row("a(positions=original,sinks=8)@1", 1.0),
        row("mod:Class@0.125", 0.125),
    ]
    names = {label: str(name) for label, name in short_names(rows).items()}
    assert names == {
        "h2o@0.5": "h2o 50 %",
        "h2o@512": "h2o 512 tok",
        "a(positions=original,sinks=8)@1": "a original sinks 8 100 %",
        "mod:Class@0.125": "mod:Class 12.5 %",
    }
    alike = short_names([row("a(x=on)@0.5"), row("a(y=on)@0.5")])
    assert len({str(name) for name in alike.values()}) == 2
