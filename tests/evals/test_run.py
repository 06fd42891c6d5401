"""The main job on a tiny random model: bytes, resuming, bad input, a policy from outside. The answers are nonsense on
purpose; what surrounds them is real.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from tiny_model import save_tiny_model

from kvgate.cli.main import main
from kvgate.evals.log.names import LEADERBOARD, MANIFEST, SAMPLES, SEAL

OUTSIDE_POLICY = '''
from dataclasses import dataclass
from typing import ClassVar

from kvgate.compressors.evidence import Evidence, Keep
from kvgate.compressors.policy import Policy
from kvgate.compressors.ranking import keep_highest


@dataclass(frozen=True)
class Oldest(Policy):
    """Keeps the oldest tokens, whatever comes."""

    name: ClassVar[str] = "oldest"
    tokens: int

    @classmethod
    def for_budget(cls, budget: int) -> "Oldest":
        return cls(tokens=budget)

    @property
    def budget(self) -> int:
        return self.tokens

    def decide(self, evidence: Evidence) -> Keep:
        count = evidence.live.sum(-1).clamp_max(self.tokens)
        return Keep(keep_highest(-evidence.positions.long(), evidence.live, count))
'''


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(folder / "model")
    (folder / "outside_policy.py").write_text(OUTSIDE_POLICY)
    plan = {
        "model": str(folder / "model"), "dtype": "float32", "batch_rows": 10,
        "suites": [
            {"name": "retrieval", "counts": {400: 2}, "tasks": ["single", "key_value"]},
            {"name": "multi_turn", "counts": {1400: 1}, "tasks": ["fact"]},
        ],
        "policies": [
            {"use": "streaming_llm", "budgets": [0.5]}, {"use": "streaming_llm_rebased", "budgets": [0.25]},
            {"use": "h2o", "budgets": [0.25]}, {"use": "sliding_window", "budgets": [64, 4096]},
        ],
    }  # fmt: skip
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan))
    assert main(["run", "--plan", str(folder / "plan.yaml"), "--out", str(folder / "done")]) == 0
    return {"folder": folder, "plan": plan, "path": folder / "plan.yaml", "done": folder / "done"}


def schema(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((files("kvgate") / "configs" / "schemas" / f"{name}.schema.json").read_text())
    return found


def test_files_match_their_schemas(tiny: dict[str, Any]) -> None:
    done: Path = tiny["done"]
    for name in ("run", "checks", "seal", "leaderboard"):
        jsonschema.validate(json.loads((done / f"{name}.json").read_text()), schema(name))
    lines = (done / SAMPLES).read_text().splitlines()
    for line in lines:
        jsonschema.validate(json.loads(line), schema("sample"))
    assert len(lines) == 5 * 6


def test_every_cell_evicted_or_says_why(tiny: dict[str, Any]) -> None:
    rows = [json.loads(line) for line in (tiny["done"] / SAMPLES).read_text().splitlines()]
    for row in rows:
        if row["policy"] != "full":
            assert (row["evicted_tokens"] > 0) != row["covered"]
            assert row["covered"] == (row["budget"] == 4096)
            assert row["covered"] or row["resident_bytes"] < row["exact_resident_bytes"]
    exact = {row["item_hash"]: row["turns"] for row in rows if row["policy"] == "full"}
    assert all(row["turns"] == exact[row["item_hash"]] for row in rows if row["covered"])


def test_a_model_that_knows_nothing_gets_nothing_enabled(tiny: dict[str, Any], capsys: Any) -> None:
    board = json.loads((tiny["done"] / LEADERBOARD).read_text())
    assert {row["status"] for row in board["rows"]} <= {"not_evaluable", "inconclusive"}
    for row in board["rows"]:
        assert main(["canary", str(tiny["done"]), "--policy", row["label"]]) == 1
        assert row["label"] in capsys.readouterr().err
    assert not (tiny["done"] / "canary").exists()
    assert main(["gate", str(tiny["done"]), "--enforce"]) == 1
    assert main(["gate", str(tiny["done"])]) == 0


def test_a_forged_leaderboard_gets_no_canary(tiny: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    for name in (MANIFEST, SAMPLES, "checks.json", SEAL, LEADERBOARD):
        (tmp_path / name).write_bytes((tiny["done"] / name).read_bytes())
    board = json.loads((tmp_path / LEADERBOARD).read_text())
    for row in board["rows"]:
        row["status"] = "enable"
    (tmp_path / LEADERBOARD).write_text(json.dumps(board))
    assert main(["canary", str(tmp_path), "--policy", board["rows"][0]["label"]]) == 1
    assert "no canary" in capsys.readouterr().err


def test_a_record_that_does_not_name_its_rows_is_refused(tiny: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    for name in (MANIFEST, SAMPLES, "checks.json", SEAL):
        (tmp_path / name).write_bytes((tiny["done"] / name).read_bytes())
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    manifest["columns"][1]["label"] = "another@0.5"
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    assert main(["gate", str(tmp_path)]) == 2
    assert f"is no row of {MANIFEST}" in capsys.readouterr().err


def test_same_plan_same_bytes(tiny: dict[str, Any], tmp_path: Path) -> None:
    assert main(["run", "--plan", str(tiny["path"]), "--out", str(tmp_path / "again"), "--json"]) == 0
    for name in (SAMPLES, LEADERBOARD, MANIFEST):
        assert (tmp_path / "again" / name).read_bytes() == (tiny["done"] / name).read_bytes(), name


def test_the_order_of_policies_changes_no_answer(tiny: dict[str, Any], tmp_path: Path) -> None:
    """Rows of one batch change places, and each still gets what it got."""
    plan = {**tiny["plan"], "policies": tiny["plan"]["policies"][::-1]}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    assert main(["run", "--plan", str(tmp_path / "plan.yaml"), "--out", str(tmp_path / "r"), "--json"]) == 0
    rows = {name: [json.loads(line) for line in (folder / SAMPLES).read_text().splitlines()]
            for name, folder in (("given", tiny["done"]), ("turned", tmp_path / "r"))}  # fmt: skip
    answers = {
        name: {(row["label"], row["item_hash"]): (row["score"], row["evicted_tokens"], row["turns"]) for row in found}
        for name, found in rows.items()
    }
    labels = {name: list(dict.fromkeys(row["label"] for row in found)) for name, found in rows.items()}
    assert labels["given"] != labels["turned"], "the order is another one"
    assert answers["given"] == answers["turned"]


@pytest.mark.parametrize("cut", [0, 1, 700, 3000, 9000, 12345])
def test_a_torn_samples_file_is_finished_with_the_same_bytes(tiny: dict[str, Any], tmp_path: Path, cut: int) -> None:
    (tmp_path / MANIFEST).write_bytes((tiny["done"] / MANIFEST).read_bytes())
    (tmp_path / SAMPLES).write_bytes((tiny["done"] / SAMPLES).read_bytes()[:cut])
    assert main(["run", "--plan", str(tiny["path"]), "--out", str(tmp_path), "--json"]) == 0
    for name in (SAMPLES, LEADERBOARD):
        assert (tmp_path / name).read_bytes() == (tiny["done"] / name).read_bytes(), name


@pytest.mark.slow
def test_killed_at_several_moments_ends_with_the_same_bytes(tiny: dict[str, Any], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvgate", "run", "--plan", str(tiny["path"]), "--out", str(tmp_path / "killed")]
    kills = 0
    for wanted in (1, 9000, 18000):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        samples = tmp_path / "killed" / SAMPLES
        while process.poll() is None and not (samples.exists() and samples.stat().st_size >= wanted):
            time.sleep(0.005)
        kills += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert kills >= 1
    assert subprocess.run(command, capture_output=True).returncode == 0
    for name in (SAMPLES, LEADERBOARD):
        assert (tmp_path / "killed" / name).read_bytes() == (tiny["done"] / name).read_bytes(), name


def test_a_policy_from_outside_is_on_the_leaderboard(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.syspath_prepend(tiny["folder"])
    arguments = ["run", "--plan", str(tiny["path"]), "--out", str(tmp_path / "r"), "--policy"]
    assert main([*arguments, "outside_policy:Oldest@0.5,100"]) == 0
    board = json.loads((tmp_path / "r" / LEADERBOARD).read_text())
    assert {row["label"] for row in board["rows"]} == {"oldest@0.5", "oldest@100"}
    assert "oldest@0.5" in capsys.readouterr().out
    for command in ("gate", "show", "report"):
        done = without_torch(command, str(tmp_path / "r"))
        assert done.returncode == 0, done.stderr[-2000:]
        assert "oldest@0.5" in (done.stdout if command != "report" else Path(done.stdout.strip()).read_text())
    for command in ("run", "policies"):
        done = without_torch(command)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr[-2000:]
        assert "torch is not installed; pip install 'kvgate[run]'" in done.stderr


def without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A command on a machine that has neither torch and what rests on it, nor the policy's own code."""
    code = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'triton', 'transformers', 'datasets', 'lm_eval'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from kvgate.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300)


def test_an_oracle_is_invalid(tiny: dict[str, Any], tmp_path: Path) -> None:
    plan = {**tiny["plan"], "policies": [{"use": "h2o", "budgets": [0.25], "oracle": True}]}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    assert main(["run", "--plan", str(tmp_path / "plan.yaml"), "--out", str(tmp_path / "r"), "--json"]) == 0
    assert {row["status"] for row in json.loads((tmp_path / "r" / LEADERBOARD).read_text())["rows"]} == {"invalid"}


def test_policies_share_scores_and_report_probes(tiny: dict[str, Any], tmp_path: Path) -> None:
    """Every budget and shape of KVzip runs on one repetition, and each reports it as if it ran alone."""
    suites = [{"name": "retrieval", "counts": {600: 1}, "tasks": ["single"]}]
    policies = [
        {"policy": "kvzip", "budgets": [0.75, 0.5]},
        {"policy": "kvzip", "params": {"shape": "head"}, "budgets": [0.5]},
        {"policy": "knorm", "budgets": [0.5]},
    ]
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump({**tiny["plan"], "suites": suites, "policies": policies}))
    assert main(["run", "--plan", str(tmp_path / "plan.yaml"), "--out", str(tmp_path / "r"), "--json"]) == 0
    records = [json.loads(line) for line in (tmp_path / "r" / SAMPLES).read_text().splitlines()]
    probes = {record["label"]: record["probe_tokens"] for record in records}
    repeated = probes.pop("kvzip@0.5")
    assert 600 < repeated < 700
    assert probes == {"full": 0, "kvzip@0.75": repeated, "kvzip(shape=head)@0.5": repeated, "knorm@0.5": 0}
    shapes = {record["label"]: (record["params"].get("shape"), record["params"].get("when")) for record in records}
    assert shapes["kvzip@0.5"] == ("model", "once")
    assert shapes["kvzip(shape=head)@0.5"] == ("head", "once")
    exact = next(record for record in records if record["label"] == "full")
    for record in records:
        if record["ratio"] is not None:
            evicted = 600 - record["budget"]
            assert abs(record["evicted_tokens"] - evicted) < 1
            saved = (exact["logical_bytes"] - record["logical_bytes"]) / exact["logical_bytes"]
            assert saved < 1 - record["ratio"], "the question stays beside the budget"


BAD = {
    "unknown key": ({"polices": []}, "unknown key 'polices'"),
    "unknown policy": ({"policies": [{"policy": "magic", "budgets": [0.5]}]}, "'magic' is unknown"),
    "unknown parameter": ({"policies": [{"policy": "h2o", "params": {"x": 1}, "budgets": [1]}]}, "parameter 'x'"),
    "budget 0": ({"policies": [{"use": "h2o", "budgets": [0]}]}, "budget 0"),
    "negative budget": ({"policies": [{"use": "h2o", "budgets": [-5]}]}, "budget -5"),
    "ratio above 1": ({"policies": [{"use": "h2o", "budgets": [1.5]}]}, "budget 1.5"),
    "ratio 0": ({"policies": [{"use": "h2o", "budgets": [0.0]}]}, "budget 0.0"),
    "ratio NaN": ({"policies": [{"use": "h2o", "budgets": [float("nan")]}]}, "budget nan"),
    "budget true": ({"policies": [{"use": "h2o", "budgets": [True]}]}, "budget True"),
    "budget under the sinks": ({"policies": [{"use": "streaming_llm", "budgets": [4]}]}, "budget 4"),
    "listed twice": ({"policies": [{"use": "h2o", "budgets": [0.5, 0.5]}]}, "listed twice"),
    "full as a policy": ({"policies": [{"policy": "full", "budgets": [0.5]}]}, "policy full"),
    "unknown suite": ({"suites": [{"name": "nope"}]}, "suite 'nope'"),
    "unknown task": ({"suites": [{"name": "retrieval", "tasks": ["nope"]}]}, "'nope'"),
    "longer than the model": ({"suites": [{"name": "retrieval", "counts": {8000: 1}}]}, "positions"),
    "probe longer than the model": (
        {
            "suites": [{"name": "retrieval", "counts": {2300: 1}, "tasks": ["single"]}],
            "policies": [{"use": "kvzip", "budgets": [0.5]}],
        },
        "policy kvzip: runs up to 2104 more tokens",
    ),
    "unknown shape": ({"policies": [{"use": "kvzip", "params": {"shape": "row"}, "budgets": [0.5]}]}, "shape 'row'"),
    "unknown gate": ({"gate": "lenient"}, "'lenient'"),
    "page size": ({"page_size": 12}, "page_size 12"),
    "pool too small": ({"pages": 10}, "pages"),
    "no such model": ({"model": "./nowhere"}, "no such folder"),
    "dtype": ({"dtype": "int4"}, "int4"),
}


@pytest.mark.parametrize("change, message", BAD.values(), ids=BAD.keys())
def test_bad_input_is_one_line_and_leaves_nothing(
    tiny: dict[str, Any], tmp_path: Path, capsys: Any, change: dict[str, Any], message: str
) -> None:
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump({**tiny["plan"], **change}))
    assert main(["run", "--plan", str(tmp_path / "plan.yaml"), "--out", str(tmp_path / "r")]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert message in error[0]
    assert not (tmp_path / "r").exists()


def test_another_machine_may_not_go_on(tiny: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    manifest = json.loads((tiny["done"] / MANIFEST).read_text())
    manifest["provenance"]["machine"]["threads"] += 1
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    assert main(["run", "--plan", str(tiny["path"]), "--out", str(tmp_path)]) == 2
    assert "another machine" in capsys.readouterr().err


def test_folder_without_weights(tiny: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_bytes((tiny["folder"] / "model" / "config.json").read_bytes())
    assert main(["run", "--plan", str(tiny["path"]), "--model", str(tmp_path / "m"), "--out", str(tmp_path / "r")]) == 2
    assert "no weights" in capsys.readouterr().err


def test_results_folder_of_another_plan(tiny: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    before = {file.name: file.read_bytes() for file in tiny["done"].iterdir()}
    assert main(["run", "--plan", str(tiny["path"]), "--seed", "7", "--out", str(tiny["done"])]) == 2
    assert "another plan" in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in tiny["done"].iterdir()} == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    assert main(["run", "--plan", str(tiny["path"]), "--out", str(tmp_path / "mine")]) == 2
    assert "holds no run" in capsys.readouterr().err
    (tmp_path / "file").write_text("x")
    assert main(["run", "--plan", str(tiny["path"]), "--out", str(tmp_path / "file")]) == 2
    assert main(["run", "--plan", str(tiny["path"]), "--out", "/proc/kvgate"]) == 2


@pytest.mark.parametrize("damage", ["score", "duplicate", "not json", "field", "foreign", "torn", "one side", "item"])
def test_damaged_samples_are_named(tiny: dict[str, Any], tmp_path: Path, capsys: Any, damage: str) -> None:
    for name in (MANIFEST, "checks.json"):
        (tmp_path / name).write_bytes((tiny["done"] / name).read_bytes())
    lines = (tiny["done"] / SAMPLES).read_text().splitlines()
    row = json.loads(lines[1])
    changed = {
        "score": json.dumps({**row, "score": 1.5}),
        "duplicate": lines[0],
        "not json": "{",
        "field": json.dumps({key: value for key, value in row.items() if key != "cluster"}),
        "foreign": json.dumps({**row, "config_hash": "0" * 32}),
        "torn": lines[1],
        "one side": None,
        "item": None,
    }[damage]
    kept = [lines[0], changed, *lines[2:]] if changed else [lines[0], *lines[2:]]
    if damage == "item":  # a lost item left out on both sides would make a policy look better
        kept = [line for line in lines if json.loads(line)["item_hash"] != row["item_hash"]]
    text = "\n".join(kept) + ("" if damage == "torn" else "\n")
    (tmp_path / SAMPLES).write_text(text)
    code = main(["gate", str(tmp_path), "--enforce"])
    captured = capsys.readouterr()
    assert code == 2
    named = {"one side": "on one side only", "item": "the plan has", "foreign": "do not belong", "torn": "incomplete"}
    assert named.get(damage, "line 2") in captured.err


def test_lists_and_help(capsys: Any) -> None:
    assert main(["policies", "--json"]) == 0
    assert {"full", "h2o", "sliding_window", "streaming_llm"} <= set(json.loads(capsys.readouterr().out))
    assert main(["suites", "--json"]) == 0
    assert {"retrieval", "code", "multi_turn"} <= set(json.loads(capsys.readouterr().out))
    for command in ([], ["run"], ["gate"], ["canary"], ["show"]):
        with pytest.raises(SystemExit) as done:
            main([*command, "--help"])
        assert done.value.code == 0
