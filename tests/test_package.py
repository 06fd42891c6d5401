"""The wheel holds every room and every shipped YAML, once, and works outside the checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_wheel_from_the_sdist_works_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(tmp_path)]
    subprocess.run([*build, "-t", "sdist"], cwd=ROOT, check=True, capture_output=True)
    (sdist,) = tmp_path.glob("*.tar.gz")
    subprocess.run(["tar", "xzf", str(sdist), "-C", str(tmp_path)], check=True)
    (source,) = (path for path in tmp_path.iterdir() if path.is_dir())
    subprocess.run([*build, "-t", "wheel"], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    assert len(names) == len(set(names))
    for wanted in (
        "kvgate/kernels/ops.py", "kvgate/evals/suites/retrieval/suite.py",
        "kvgate/lifecycle/pool.py", "kvgate/py.typed",
        "kvgate/configs/gates/screen.yaml", "kvgate/configs/plans/quick.yaml",
        "kvgate/configs/schemas/sample.schema.json",
    ):  # fmt: skip
        assert wanted in names
    assert all(name.startswith("kvgate") for name in names), "a top-level room would shadow other packages"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    code = "import kvgate; from kvgate.cli.main import main; print(kvgate.__file__); main(['policies', '--json'])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    )
    first, _, rest = done.stdout.partition("\n")
    assert first.startswith(str(tmp_path / "site"))
    assert "h2o" in json.loads(rest)
