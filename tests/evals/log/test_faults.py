"""A disk that takes no more, and two runs in one folder: one line each, and the run ends as if nothing had been."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tiny_model import save_tiny_model

from kvgate.cli.main import main
from kvgate.evals.log.lock import Lock
from kvgate.evals.log.names import LEADERBOARD, LOCK, SAMPLES, SEAL

LIMITED = """
import resource, signal, sys
from kvgate.cli.main import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    plan = {
        "model": str(save_tiny_model(folder / "model")), "dtype": "float32", "batch_rows": 6,
        "suites": [{"name": "retrieval", "counts": {400: 6}, "tasks": ["single"]}],
        "policies": [{"use": "h2o", "budgets": [0.25]}],
    }  # fmt: skip
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan))
    return folder / "plan.yaml"


@pytest.mark.slow
def test_a_disk_that_takes_no_more_is_one_line_and_the_run_goes_on(plan: Path, tmp_path: Path) -> None:
    """The size of files is limited by the system, so that a write fails in the middle of a batch's lines."""
    words = ["run", "--plan", str(plan), "--json", "--out"]
    assert main([*words, str(tmp_path / "whole")]) == 0
    size = (tmp_path / "whole" / SAMPLES).stat().st_size
    command = [sys.executable, "-c", LIMITED, str(size * 2 // 3), *words, str(tmp_path / "cut")]
    # Libraries write caches of their own when they are imported; what is not written there costs nothing.
    found = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"})
    assert found.returncode == 2, found.stderr
    (line,) = [line for line in found.stderr.splitlines() if "kvgate" in line]
    assert line.startswith(f"kvgate: results folder {tmp_path / 'cut'}: File too large; ")
    assert "goes on where it stopped" in line
    assert not (tmp_path / "cut" / SEAL).exists()
    assert main([*words, str(tmp_path / "cut")]) == 0
    for name in (SAMPLES, LEADERBOARD, SEAL):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_the_second_of_two_runs_in_one_folder_is_refused(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r"
    out.mkdir()
    lock = Lock(out / LOCK)
    assert main(["run", "--plan", str(plan), "--out", str(out)]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("kvgate")]
    assert f"another kvgate is at work in it (process {os.getpid()} on " in line
    assert [path.name for path in out.iterdir()] == [LOCK]
    lock.release()
    assert main(["run", "--plan", str(plan), "--out", str(out), "--json"]) == 0
    assert not (out / LOCK).exists()
    assert json.loads((out / SEAL).read_text())["records"] == 12


def test_a_finished_run_that_was_edited_is_not_sealed_again(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Otherwise running a plan once more in its folder would make an edited record as good as a true one."""
    words = ["run", "--plan", str(plan), "--out", str(tmp_path / "r"), "--json"]
    assert main(words) == 0
    samples = tmp_path / "r" / SAMPLES
    samples.write_text(samples.read_text().replace('"score":0.0', '"score":1.0', 1))
    edited = samples.read_bytes()
    capsys.readouterr()
    assert main(words) == 2
    assert "not as it was when the run was finished" in capsys.readouterr().err
    assert samples.read_bytes() == edited
