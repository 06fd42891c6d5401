"""``kvgate lm-eval`` with local tasks, offline: a results folder like any other.

The gold answers are what the tiny random model itself says, so that its exact run is competent.
"""

from __future__ import annotations

import json
import random
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from tiny_model import save_tiny_model

from kvgate.cli.main import main
from kvgate.evals.leaderboard.finished import load_run
from kvgate.evals.lm_eval.records import nominal_lengths
from kvgate.evals.log.names import LEADERBOARD, MANIFEST, SAMPLES
from kvgate.evals.log.run_folder import write_seal

WORDS = ["amber", "birch", "cedar", "dune", "ember", "fjord", "grove", "heath", "islet", "jetty"]
DOCUMENTS = 12


def task(folder: Path, name: str, documents: list[dict[str, Any]], **more: Any) -> None:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in documents))
    data = {"data_files": {"test": str(folder / f"{name}.jsonl")}, "cache_dir": str(folder / "cache")}
    config = {
        "task": name, "dataset_path": "json", "dataset_kwargs": data,
        "test_split": "test", "doc_to_text": "{{text}}", **more,
    }  # fmt: skip
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(config))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("lm_eval")
    model = save_tiny_model(folder / "model", seed=5)
    (folder / "tasks").mkdir()
    rng = random.Random(1)
    texts = [" ".join(rng.choices(WORDS, k=20 + 3 * place)) + "\nAnswer:" for place in range(DOCUMENTS)]
    choices = [rng.sample(WORDS, 4) for _ in texts]
    gold, written = own_answers(str(model), texts, choices)
    rows = [
        {"text": text, "choices": few, "gold": best, "written": said}
        for text, few, best, said in zip(texts, choices, gold, written, strict=True)
    ]
    tasks = folder / "tasks"
    accuracy = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
    task(tasks, "local_choice", rows, output_type="multiple_choice", doc_to_choice="{{choices}}",
         doc_to_target="{{gold}}", metric_list=accuracy)  # fmt: skip
    task(tasks, "local_answer", rows, output_type="generate_until", doc_to_target="{{written}}",
         generation_kwargs={"until": ["\n\n"], "max_gen_toks": 6, "do_sample": False},
         metric_list=[{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}])  # fmt: skip
    task(tasks, "local_rolling", rows, output_type="loglikelihood_rolling", doc_to_target="{{text}}",
         metric_list=[{"metric": "word_perplexity"}])  # fmt: skip
    task(tasks, "local_likelihood", rows, output_type="loglikelihood", doc_to_target=" amber", metric_list=accuracy)
    task(tasks, "local_long", [{**rows[0], "text": "x" * 5000}], output_type="loglikelihood", doc_to_target=" amber",
         metric_list=accuracy)  # fmt: skip
    task(tasks, "local_sampling", rows, output_type="generate_until", doc_to_target="{{written}}",
         generation_kwargs={"until": ["\n\n"], "do_sample": True, "temperature": 0.8},
         metric_list=[{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}])  # fmt: skip
    return {"folder": folder, "model": str(model), "tasks": str(tasks)}


def own_answers(model: str, texts: list[str], choices: list[list[str]]) -> tuple[list[int], list[str]]:
    from lm_eval.api.instance import Instance

    from kvgate.evals.lm_eval.model import KvgateLM

    lm = KvgateLM(model, dtype="float32")
    gold = []
    for place, (text, few) in enumerate(zip(texts, choices, strict=True)):
        asked = [Instance("loglikelihood", {}, (text, f" {word}"), 0, ("t", place, 1)) for word in few]
        totals = [total for total, _ in lm.loglikelihood(asked)]
        gold.append(totals.index(max(totals)))
    asked = [Instance("generate_until", {}, (text, {"max_gen_toks": 6}), 0, ("t", 99, 1)) for text in texts]
    return gold, lm.generate_until(asked)


def arguments(made: dict[str, Any], out: Path, *more: str) -> list[str]:
    return [
        "lm-eval", "--model", made["model"], "--dtype", "float32", "--include-path", made["tasks"],
        "--out", str(out), *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def done(made: dict[str, Any]) -> Path:
    out: Path = made["folder"] / "done"
    tasks = "local_choice,local_answer,local_likelihood"
    assert main(arguments(made, out, "--tasks", tasks, "--policy", "h2o@0.25,5000", "--json")) == 0
    return out


def test_the_folder_matches_the_schemas_and_its_own_leaderboard(done: Path) -> None:
    for name in ("run", "checks", "leaderboard"):
        schema = json.loads((files("kvgate") / "configs" / "schemas" / f"{name}.schema.json").read_text())
        jsonschema.validate(json.loads((done / f"{name}.json").read_text()), schema)
    schema = json.loads((files("kvgate") / "configs" / "schemas" / "sample.schema.json").read_text())
    for line in (done / SAMPLES).read_text().splitlines():
        jsonschema.validate(json.loads(line), schema)
    assert load_run(done).leaderboard() == json.loads((done / LEADERBOARD).read_text())


def test_documents_are_paired_and_scored_by_their_tasks(done: Path) -> None:
    records = load_run(done).records
    assert len(records) == 3 * DOCUMENTS * 3
    for suite in ("local_choice", "local_answer", "local_likelihood"):
        sides: dict[str, list[Any]] = {}
        for record in records:
            if record.suite == suite:
                sides.setdefault(record.label, []).append(record)
        assert set(sides) == {"full", "h2o@0.25", "h2o@5000"}
        hashes = [[record.item_hash for record in side] for side in sides.values()]
        assert hashes[0] == hashes[1] == hashes[2]
        assert len(set(hashes[0])) == DOCUMENTS
        assert [record.index for record in sides["full"]] == list(range(DOCUMENTS))
        if suite != "local_likelihood":
            assert {record.score for record in sides["full"]} == {1.0}
        assert [record.turns for record in sides["h2o@5000"]] != [record.turns for record in sides["h2o@0.25"]]
        for one, other in zip(sides["full"], sides["h2o@5000"], strict=True):
            assert other.covered
            assert (one.score, one.turns[0].tokens) == (other.score, other.turns[0].tokens)
        for record in sides["h2o@0.25"]:
            assert record.evicted_tokens > 0
            assert not record.covered
            assert record.protocol == "whole_prompt"
            assert 0 < record.resident_bytes < record.exact_resident_bytes
    assert {record.turns[0].label for record in records} == {"acc,none", "exact_match,none"}


def test_show_gate_and_canary_read_it(done: Path, capsys: Any) -> None:
    board = json.loads((done / LEADERBOARD).read_text())
    assert {row["label"] for row in board["rows"]} == {"h2o@0.25", "h2o@5000"}
    assert board["checks"]["repeat"]["full"]["different"] == 0
    assert {entry["suite"] for entry in board["exact"]} == {"local_choice", "local_answer", "local_likelihood"}
    for row in board["rows"]:
        assert row["status"] not in ("enable", "invalid"), row["reasons"]
    assert main(["show", str(done)]) == 0
    assert "local_choice" in capsys.readouterr().out
    assert main(["gate", str(done), "--gate", "production", "--enforce"]) == 1
    assert main(["canary", str(done), "--policy", "h2o@0.25"]) == 1


def test_a_policy_that_loses_nothing_is_enabled_and_gets_a_canary(made: dict[str, Any], tmp_path: Path) -> None:
    gate = {
        "name": "lenient", "m_suite": 0.4, "m_slice": 0.45, "floor": 0.5, "floor_confidence": 0.6, "min_items": 5,
        "min_clusters": 5, "min_slice_clusters": 6, "alpha": 0.2, "slice_by": ["length"], "shadow_only": True,
        "canary_fraction": 0.0,
    }  # fmt: skip
    (tmp_path / "lenient.yaml").write_text(yaml.safe_dump(gate))
    out = tmp_path / "r"
    command = arguments(made, out, "--tasks", "local_choice", "--policy", "sliding_window@0.98", "--json")
    assert main([*command, "--gate", str(tmp_path / "lenient.yaml"), "--enforce"]) in (0, 1)
    row = json.loads((out / LEADERBOARD).read_text())["rows"][0]
    if row["policy_score"] == 1.0:
        assert row["status"] == "enable", row["reasons"]
        assert main(["canary", str(out), "--policy", row["label"], "--include-path", made["tasks"]]) == 0
    assert row["evicted_tokens"] > 0


def test_answers_are_scored_again_by_lm_eval(made: dict[str, Any], done: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["verify", str(done), "--include-path", made["tasks"]]) == 0
    assert f"{3 * DOCUMENTS} items built and {9 * DOCUMENTS} answers scored again" in capsys.readouterr().out
    forged = tmp_path / "forged"
    shutil.copytree(done, forged)
    rows = [json.loads(line) for line in (forged / SAMPLES).read_text().splitlines()]
    place = next(place for place, row in enumerate(rows) if row["score"] == 0.0)
    rows[place]["score"] = rows[place]["turns"][0]["score"] = 1.0
    (forged / SAMPLES).write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_seal(forged)
    assert main(["verify", str(forged), "--include-path", made["tasks"]]) == 1
    assert "score is 1.0, made again it is 0.0" in capsys.readouterr().out


@pytest.mark.slow
def test_the_same_command_gives_the_same_bytes(made: dict[str, Any], done: Path, tmp_path: Path) -> None:
    names = (MANIFEST, SAMPLES, LEADERBOARD)
    tasks = "local_choice,local_answer,local_likelihood"
    out = tmp_path / done.name
    assert main(arguments(made, out, "--tasks", tasks, "--policy", "h2o@0.25,5000", "--json")) == 0
    assert [(out / name).read_bytes() for name in names] == [(done / name).read_bytes() for name in names]


@pytest.mark.parametrize(
    "more, message",
    [
        (["--tasks", "local_rolling", "--policy", "h2o@0.5"], "local_rolling: metric 'none' cannot be judged"),
        (["--tasks", "local_long", "--policy", "h2o@0.5"], "task local_long, document 0: needs"),
        (["--tasks", "local_sampling", "--policy", "h2o@0.5"], "task local_sampling: generation argument do_sample"),
        (["--tasks", "local_choice", "--policy", "magic@0.5"], "'magic' is unknown"),
        (["--tasks", "local_choice", "--policy", "h2o@0.5", "--metric", "f1"], "metric 'f1' cannot be judged"),
        (["--tasks", "local_choice", "--policy", "h2o@0.5", "--metric", "acc,other"], "no filter 'other'"),
        (["--tasks", "local_choice", "--policy", "h2o@0.5", "--limit", "0"], "--limit: 0 is not from 1"),
        (["--tasks", ",", "--policy", "h2o@0.5"], "--tasks"),
        (["--tasks", "local_choice", "--policy", "h2o@0.5", "--gate", "lenient"], "'lenient'"),
    ],
)
def test_bad_input_is_one_line(
    made: dict[str, Any], tmp_path: Path, capsys: Any, more: list[str], message: str
) -> None:
    assert main(arguments(made, tmp_path / "r", *more)) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("kvgate:")]
    assert len(errors) == 1
    assert message in errors[0]
    assert not (tmp_path / "r" / SAMPLES).exists()


def test_a_folder_of_something_else_is_left_alone(
    made: dict[str, Any], done: Path, tmp_path: Path, capsys: Any
) -> None:
    before = (done / SAMPLES).read_bytes()
    assert main(arguments(made, done, "--tasks", "local_choice", "--policy", "h2o@0.5")) == 2
    assert "holds another run" in capsys.readouterr().err
    assert (done / SAMPLES).read_bytes() == before
    (tmp_path / "thesis.tex").write_text("x")
    assert main(arguments(made, tmp_path, "--tasks", "local_choice", "--policy", "h2o@0.5")) == 2
    assert "holds no run" in capsys.readouterr().err


@pytest.mark.slow
def test_an_unknown_task_is_named(made: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    assert main(arguments(made, tmp_path / "r", "--tasks", "no_such_task", "--policy", "h2o@0.5")) == 2
    assert "'no_such_task'" in capsys.readouterr().err


def test_lengths_are_slices_of_enough_documents() -> None:
    assert nominal_lengths([10, 100, 100, 500], 1) == [64, 128, 128, 512]
    assert nominal_lengths([10, 100, 100, 500], 2) == [512, 512, 512, 512]
    assert nominal_lengths([64, 65], 10) == [128, 128]
    assert nominal_lengths([10, 10, 100, 100, 500], 2) == [64, 64, 512, 512, 512]
