"""The public API and the examples of the documentation, run as their readers run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import kvgate
from kvgate.cli.main import main

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
sys.path.append(str(ROOT / "tests" / "evals" / "helpers"))

from tiny_model import save_tiny_model  # noqa: E402


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder)
    return folder


def test_every_public_name_is_there_and_no_other() -> None:
    assert all(getattr(kvgate, name) is not None for name in kvgate.__all__)
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        kvgate.absent  # noqa: B018


def test_the_example_judges_and_runs(model: Path, tmp_path: Path) -> None:
    script = [sys.executable, str(EXAMPLES / "judge_and_run.py"), str(model), str(tmp_path / "out")]
    done = subprocess.run(script, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    verdict, listed, measured = done.stdout.splitlines()
    assert verdict.startswith("mine: enable (gate production")
    assert "'h2o'" in listed
    assert "'retrieval'" in listed
    assert measured.startswith("{'h2o@0.5': ")
    assert (tmp_path / "out" / "samples.jsonl").read_text().count("\n") == 8


def test_a_plan_that_cannot_be_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="policies"):
        kvgate.run({"suites": ["retrieval"]}, tmp_path)


def test_a_policy_and_a_suite_of_ones_own(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    plan = {
        "model": str(model), "dtype": "float32", "suites": [{"name": "my_suite:LastWord", "counts": {512: 3}}],
        "policies": [{"policy": "newest:Newest", "budgets": [0.5]}],
    }  # fmt: skip
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(plan))
    assert main(["run", "--plan", str(tmp_path / "mine.yaml"), "--out", str(tmp_path / "r"), "--json"]) == 0
    assert (tmp_path / "r" / "samples.jsonl").read_text().count('"label":"newest@0.5"') == 3


def test_the_documentation_builds_without_warnings(tmp_path: Path) -> None:
    """Links, anchors and the included examples too: mkdocs is told that every warning is an error."""
    pytest.importorskip("mkdocs", reason="pip install 'kvgate[docs]'")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "-q",
        "-f",
        str(ROOT / "mkdocs.yml"),
        "-d",
        str(tmp_path),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (tmp_path / "ARCHITECTURE" / "index.html").is_file()
