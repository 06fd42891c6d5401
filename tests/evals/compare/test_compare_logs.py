"""Logs of other tools into pairs, and what is wrong with them in one line."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvgate.cli.main import main
from kvgate.evals.compare.judge import ScoredPair
from kvgate.evals.compare.logs import read_logs


def sample(doc: int, score: float, **changes: Any) -> dict[str, Any]:
    """A line as lm-eval's evaluator writes it."""
    return {
        "doc_id": doc, "doc": {"q": str(doc)}, "target": "x", "arguments": {},
        "resps": [["x"]], "filtered_resps": ["x"],
        "filter": "none", "metrics": ["acc", "perplexity"], "acc": score, "perplexity": 12.5,
        "doc_hash": f"d{doc}", "prompt_hash": f"p{doc}", "target_hash": f"t{doc}", **changes,
    }  # fmt: skip


def lm_eval_folder(folder: Path, score: Callable[[int], float], task: str = "arc", **changes: Any) -> Path:
    (folder / "model").mkdir(parents=True)
    lines = [json.dumps(sample(doc, score(doc), **changes)) for doc in range(20)]
    (folder / "model" / f"samples_{task}_2026-12-03T10-00-00.123456.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def inspect_log(path: Path, value: Callable[[int], Any], method: int = zipfile.ZIP_DEFLATED) -> Path:
    samples = [
        {"id": i, "epoch": 1 + i % 2, "input": f"q{i // 2}", "target": "x", "scores": {"match": {"value": value(i)}}}
        for i in range(8)
    ]
    header = {"version": 2, "status": "success", "eval": {"task": "hard"}}
    if path.suffix == ".json":
        path.write_text(json.dumps({**header, "samples": samples}))
        return path
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("header.json", json.dumps(header))
        for number, one in enumerate(samples):
            archive.writestr(f"samples/{number}_epoch_{one['epoch']}.json", json.dumps(one))
        archive.writestr("_journal/start.json", "{}")
    return path


def test_one_plain_file_has_both_scores(tmp_path: Path) -> None:
    (tmp_path / "pairs.csv").write_text("task,item,cluster,score_exact,score_candidate\nqa,1,d1,1.0,0.5\nqa,2,,0,1\n")
    expected = [ScoredPair("qa", "1", "d1", 1.0, 0.5), ScoredPair("qa", "2", None, 0.0, 1.0)]
    assert read_logs([tmp_path / "pairs.csv"]) == expected
    (tmp_path / "pairs.jsonl").write_text(
        '{"task": "qa", "item": 1, "cluster": "d1", "score_a": 1, "score_b": 0.5}\n'
        '{"task": "qa", "item": 2, "score_a": 0, "score_b": 1}\n'
    )
    assert read_logs([tmp_path / "pairs.jsonl"]) == expected


def test_two_plain_files_are_joined_by_task_and_item(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("task,item,score\nqa,1,1.0\nqa,2,0.25\n")
    (tmp_path / "b.jsonl").write_text('{"task":"qa","item":"2","score":0.5}\n{"task":"qa","item":1,"score":0}\n')
    pairs = read_logs([tmp_path / "a.csv", tmp_path / "b.jsonl"])
    assert pairs == [ScoredPair("qa", "1", None, 1.0, 0.0), ScoredPair("qa", "2", None, 0.25, 0.5)]


def test_lm_eval_samples_pair_by_task_document_and_filter(tmp_path: Path) -> None:
    exact = lm_eval_folder(tmp_path / "a", lambda doc: 1.0)
    candidate = lm_eval_folder(tmp_path / "b", lambda doc: float(doc > 4))
    pairs = read_logs([exact, candidate])
    assert len(pairs) == 20
    assert {pair.task for pair in pairs} == {"arc"}
    assert sum(pair.score_candidate for pair in pairs) == 15


@pytest.mark.parametrize("name", ["doc_hash", "prompt_hash", "target_hash"])
def test_lm_eval_hashes_must_match(tmp_path: Path, name: str) -> None:
    exact = lm_eval_folder(tmp_path / "a", lambda doc: 1.0)
    candidate = lm_eval_folder(tmp_path / "b", lambda doc: 1.0, **{name: "other"})
    with pytest.raises(ValueError, match=f"{name} differs"):
        read_logs([exact, candidate])


def test_inspect_logs_zipped_and_plain_give_the_same_pairs(tmp_path: Path) -> None:
    exact = inspect_log(tmp_path / "a.eval", lambda i: "C")
    candidate = inspect_log(tmp_path / "b.eval", lambda i: "CIPN"[i % 4])
    pairs = read_logs([exact, candidate])
    assert [pair.score_candidate for pair in pairs] == [1.0, 0.0, 0.5, 0.0] * 2
    assert {pair.task for pair in pairs} == {"hard"}
    assert pairs[0].cluster == "0"
    plain = [inspect_log(tmp_path / "a.json", lambda i: 1), inspect_log(tmp_path / "b.json", lambda i: "CIPN"[i % 4])]
    assert read_logs(plain) == pairs


def test_inspect_logs_in_zstd(tmp_path: Path) -> None:
    pytest.importorskip("zipfile_zstd", reason="the extra [logs] is not installed")
    pairs = read_logs([inspect_log(tmp_path / f"{side}.eval", lambda i: "C", 93) for side in "ab"])
    assert len(pairs) == 8


BAD: dict[str, tuple[Callable[[Path], list[Path]], str]] = {
    "three": (lambda t: [t / "x.csv"] * 3, "3 given"),
    "absent": (lambda t: [t / "x.csv"], "no such file"),
    "one side only": (lambda t: [inspect_log(t / "a.eval", lambda i: 1)], "give the candidate's log"),
    "two kinds": (
        lambda t: [inspect_log(t / "a.eval", lambda i: 1), lm_eval_folder(t / "b", lambda d: 1.0)],
        "another kind",
    ),
    "not a zip": (lambda t: [written(t / "a.eval", "x"), written(t / "b.eval", "x")], ".eval logs"),
    "unfinished": (lambda t: [written(t / "a.json", "{}")] * 2, "eval: is NoneType"),
    "out of range": (
        lambda t: [lm_eval_folder(t / side, lambda d: 3.0) for side in "ab"],
        "no metric in [0, 1] among acc",
    ),
    "no hashes": (
        lambda t: [lm_eval_folder(t / side, lambda d: 1.0, doc_hash=None) for side in "ab"],
        "doc_hash missing",
    ),
    "letters": (
        lambda t: [inspect_log(t / f"{side}.eval", lambda i: "maybe") for side in "ab"],
        "metric match is 'maybe'",
    ),
    "scores": (
        lambda t: [written(t / "a.csv", "task,item,score_exact,score_b\nt,1,2,0\n")],
        "line 2: score_exact is '2'",
    ),
    "columns": (lambda t: [written(t / "a.csv", "task,item\nt,1\n")], "no score_exact or score_a; it has task, item"),
    "items": (lambda t: [written(t / "a.csv", "task,item,score_a,score_b\n,1,1,1\n")], "task is ''"),
    "nested": (lambda t: [written(t / "a.jsonl", "[" * 10_000)], "a.jsonl, line 1"),
    "twice": (lambda t: [written(t / "a.csv", "task,item,score\nt,1,1\nt,1,1\n")] * 2, "comes twice"),
    "missing": (
        lambda t: [written(t / "a.csv", "task,item,score\nt,1,1\n"), written(t / "b.csv", "task,item,score\nt,2,1\n")],
        "lacks 1 of 1 items",
    ),
    "kind": (lambda t: [written(t / "a.parquet", "x")], "no log of a known kind"),
    "empty": (lambda t: [written(t / "a.csv", "")], "there are none"),
}


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", BAD)
def test_bad_logs_are_one_line_and_exit_2(name: str, tmp_path: Path, capsys: Any) -> None:
    make, says = BAD[name]
    assert main(["compare", "--logs", *map(str, make(tmp_path))]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1
