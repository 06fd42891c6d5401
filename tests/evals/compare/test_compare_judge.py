"""``kvgate.judge`` on pairs, those of real LongBench runs among them, and the pytest fixture."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvgate
from kvgate.cli.main import main
from kvgate.evals.judge.gates import load_gate

SHARED = Path(__file__).parents[3] / ".." / "shared" / "longbench_pairs"
if not SHARED.is_dir():
    SHARED = Path(__file__).parents[3] / ".." / ".." / "shared" / "longbench_pairs"
needs_longbench = pytest.mark.skipif(not SHARED.is_dir(), reason="shared/longbench_pairs is not beside the checkout")


def made(lost: dict[str, float], items: int = 200, tasks: int = 5) -> list[kvgate.ScoredPair]:
    rng = random.Random(7)
    return [
        kvgate.ScoredPair(name, i, None, 1.0, float(rng.random() >= lost.get(name, 0.0)))
        for name in (f"task{number}" for number in range(tasks))
        for i in range(items)
    ]


@needs_longbench
@pytest.mark.parametrize("name, enabled", [("kivi_4bit", True), ("h2o_2048", False), ("streaming_2048", False)])
def test_real_longbench_pairs(name: str, enabled: bool, capsys: Any) -> None:
    code = main(["compare", "--logs", str(SHARED / f"{name}.csv"), "--floor", "0.11", "--enforce", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["status"] == "enable") == enabled == (code == 0)
    assert len(found["tasks"]) == 14
    assert found["scope"]["excluded"] == ["all tasks, task passage_count"]
    assert not found["gate"]["shipped"]


@needs_longbench
def test_pooling_the_tasks_hides_a_loss_and_the_scope_says_so(tmp_path: Path, capsys: Any) -> None:
    gate = tmp_path / "pooled.yaml"
    gate.write_text("m_suite: 0.03\nm_slice: 0.1\nfloor: 0.11\nslice_by: []\n")
    assert main(["compare", "--logs", str(SHARED / "h2o_2048.csv"), "--gate", str(gate), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["status"] == "enable"
    assert found["scope"]["pooled"] == ["all tasks: 14 values of task judged together"]


def test_one_task_of_five_decides() -> None:
    assert kvgate.judge(made({})).enabled
    lost = kvgate.judge(made({"task3": 0.4}))
    assert lost.blocked
    assert "task task3" in " ".join(lost.reasons)
    assert "task3" in str(lost)
    json.dumps(lost.to_dict(), allow_nan=False)


def test_clusters_count_once_within_their_task() -> None:
    pairs = [pair._replace(cluster=int(pair.item) // 50) for pair in made({})]
    found = kvgate.judge(pairs)
    assert (found.items, found.clusters, found.status) == (1000, 20, "inconclusive")


def test_gates_by_name_file_and_object(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("m_suite: 0.05\nm_slice: 0.2\n")
    assert kvgate.judge(made({}), path).gate["name"] == "mine"
    assert not kvgate.judge(made({}), replace(load_gate("production"), name="other")).gate["shipped"]
    assert kvgate.judge(made({}), "strict").gate["shipped"]


@pytest.mark.parametrize(
    "pairs, says",
    [
        ([], "none"),
        ([("t", 1, None, 1.0)], "pair 1 is"),
        ([("t", 1, None, 1.0, 1.2)], "score_candidate is 1.2"),
        ([("t", 1, None, float("nan"), 1.0)], "score_exact is nan"),
        ([("t", 1, None, True, 1.0)], "score_exact is True"),
        ([("", 1, None, 1.0, 1.0)], "task is ''"),
        ([("t", 1, None, 1.0, 1.0), ("t", "1", None, 1.0, 1.0)], "comes twice"),
    ],
)
def test_bad_pairs_are_named(pairs: list[Any], says: str) -> None:
    with pytest.raises(ValueError, match="pair") as caught:
        kvgate.judge(pairs)
    assert says in str(caught.value)


@pytest.mark.slow
def test_no_torch_is_imported() -> None:
    script = (
        "import sys, kvgate\n"
        "print(kvgate.judge([('t', i, None, 1.0, 1.0) for i in range(300)]).status)\n"
        "assert not {'torch', 'transformers', 'triton'} & set(sys.modules), 'too much was imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "enable\n"


@pytest.mark.slow
def test_the_fixture_fails_a_teams_test_on_a_proved_loss(tmp_path: Path) -> None:
    (tmp_path / "test_theirs.py").write_text(
        "def pairs(lost):\n"
        "    return [('qa', i, None, 1.0, float(i >= lost)) for i in range(300)]\n"
        "def test_fine(kvgate_compare):\n"
        "    assert kvgate_compare(pairs(0), require='enable').enabled\n"
        "def test_open(kvgate_compare):\n"
        "    assert kvgate_compare(pairs(8)).status == 'inconclusive'\n"
        "def test_open_is_not_enough(kvgate_compare):\n"
        "    kvgate_compare(pairs(8), require='enable')\n"
        "def test_lost(kvgate_compare):\n"
        "    kvgate_compare(pairs(120), candidate='int4')\n"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "kvgate.evals.compare.pytest_plugin",
            "-p",
            "no:cacheprovider",
            ".",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    assert "2 failed, 2 passed" in done.stdout, done.stdout
    assert "int4: block (gate production)" in done.stdout
