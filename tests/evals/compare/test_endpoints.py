"""Two endpoints, asked over HTTP: right verdicts, no score for a failure, nothing cut unseen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from answering import Model, served

from kvgate.cli.main import main
from kvgate.evals.compare.endpoints.answers import AnswerFile
from kvgate.evals.compare.endpoints.client import Endpoint
from kvgate.evals.compare.endpoints.compare import EndpointComparison, Settings, compare_endpoints
from kvgate.evals.judge.gates import parse_gate
from kvgate.evals.plan.config import parse_plan

RULES = (
    "name: easy\nm_suite: 0.2\nm_slice: 0.4\nmin_items: 10\nmin_clusters: 10\nmin_slice_clusters: 5\nslice_by: [task]\n"
)
GATE = parse_gate(RULES, "easy")
PLAN = {
    "name": "easy",
    "model": "embedded",
    "suites": [{"name": "retrieval", "counts": {1024: 20}, "tasks": ["single"]}],
    "policies": [{"use": "h2o", "budgets": [0.5]}],
}


def compared(
    exact: Model, candidate: Model, out: Path, api: Any = "completions", retries: int = 2
) -> EndpointComparison:
    config = parse_plan(PLAN, "test")
    with served(exact) as a, served(candidate) as b:
        sides = [Endpoint(url, api=api, retries=2) for url in (a, b)]
        return compare_endpoints(config, *sides, Settings(concurrency=3), out, gate=GATE)


@pytest.mark.slow
@pytest.mark.parametrize("api", ["completions", "chat"])
def test_the_same_model_is_enabled_and_one_that_forgets_is_blocked(tmp_path: Path, api: str) -> None:
    good = compared(Model(), Model(), tmp_path / "good", api)
    assert good.verdict.status == "enable", good.verdict.reasons
    assert (good.noise.texts_differ, good.noise.score_change, good.unchecked) == (0.0, 0.0, 0)
    bad = compared(Model(), Model(window=200), tmp_path / "bad", api)
    assert bad.verdict.status == "block"
    assert bad.verdict.suites[0].exact > 0.9


@pytest.mark.slow
def test_an_exact_side_that_differs_from_itself_settles_nothing(tmp_path: Path) -> None:
    found = compared(Model(wander=True), Model(), tmp_path / "out")
    assert found.noise.score_change > GATE.m_suite
    assert found.verdict.status in ("inconclusive", "not_evaluable")


def test_a_cut_prompt_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cut the prompt of retrieval/single item \d+ .*1000 counted"):
        compared(Model(limit=1000), Model(), tmp_path / "out")


@pytest.mark.slow
def test_failures_are_retried_then_left_for_the_next_try_and_never_scored(tmp_path: Path) -> None:
    flaky = Model(fails=lambda number: number % 3 == 0)
    assert compared(Model(), flaky, tmp_path / "flaky").verdict.status == "enable"
    broken = Model(fails=lambda number: number > 20)
    out = tmp_path / "broken"
    config = parse_plan(PLAN, "test")
    with served(Model()) as a, served(broken) as b:
        sides = [Endpoint(url, retries=0) for url in (a, b)]
        with pytest.raises(ValueError, match="answers are missing, none of them was scored"):
            compare_endpoints(config, *sides, Settings(concurrency=1), out, gate=GATE)
        kept = AnswerFile(out / "answers.jsonl").records
        assert 0 < len(kept) < 60
        assert sum(record.score for record in kept.values()) > 0.9 * len(kept)
        broken.fails = lambda number: False
        asked = broken.requests
        found = compare_endpoints(config, *sides, Settings(concurrency=1), out, gate=GATE)
    assert found.verdict.status == "enable"
    assert broken.requests - asked < 30, "answers that were there are not asked for again"


@pytest.mark.slow
def test_a_torn_line_is_asked_again_and_another_comparison_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    config = parse_plan(PLAN, "test")
    with served(Model()) as a, served(Model()) as b:
        sides = [Endpoint(url) for url in (a, b)]
        first = compare_endpoints(config, *sides, Settings(), out, gate=GATE)
        whole = (out / "answers.jsonl").read_bytes()
        (out / "answers.jsonl").write_bytes(whole[:-40])
        again = compare_endpoints(config, *sides, Settings(), out, gate=GATE)
        assert sorted((out / "answers.jsonl").read_bytes().split(b"\n")) == sorted(whole.split(b"\n"))
        assert again.verdict == first.verdict
        with pytest.raises(ValueError, match="holds another comparison"):
            compare_endpoints(config, *sides, Settings(flags="--other"), out, gate=GATE)


def test_an_edited_answer_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    for text in ('{"side": "exact"}\n', "[1]\n", '{"side":"exact","item_hash":"a","score":2,"turns":[]}\n', "[" * 9000):
        path.write_text(text if text.endswith("\n") else text + "\n")
        with pytest.raises(ValueError, match=r"answers\.jsonl, line 1"):
            AnswerFile(path)


@pytest.mark.slow
def test_the_command_asks_judges_and_enforces(tmp_path: Path, capsys: Any) -> None:
    plan, gate = tmp_path / "plan.yaml", tmp_path / "easy.yaml"
    plan.write_text(json.dumps(PLAN))
    gate.write_text(RULES)
    with served(Model()) as a, served(Model(window=200)) as b:
        common = ["compare", "--exact", a, "--plan", str(plan), "--gate", str(gate), "--enforce"]
        assert main([*common, "--candidate", a, "--out", str(tmp_path / "good")]) == 0
        assert "enable by gate easy" in capsys.readouterr().out
        assert main([*common, "--candidate", b, "--out", str(tmp_path / "bad")]) == 1
        assert "block by gate easy" in capsys.readouterr().out
    assert json.loads((tmp_path / "bad" / "comparison.json").read_text())["verdict"]["status"] == "block"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give --logs, or --exact and --candidate"),
        (["--exact", "http://127.0.0.1:9"], "go together"),
        (["--exact", "ftp://x", "--candidate", "http://127.0.0.1:9"], "no http address"),
        (["--exact", "http://127.0.0.1:9", "--candidate", "http://127.0.0.1:9", "--retries", "0"], "/v1/models"),
        (["--exact", "http://127.0.0.1:9", "--candidate", "http://127.0.0.1:9", "--concurrency", "0"], "concurrency"),
        (["--exact", "http://127.0.0.1:9", "--candidate", "http://127.0.0.1:9", "--noise-share", "0"], "noise-share"),
    ],
)
def test_bad_options_are_one_line(words: list[str], said: str, tmp_path: Path, capsys: Any) -> None:
    assert main(["compare", *words, *(["--out", str(tmp_path / "out")] if words else [])]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()
