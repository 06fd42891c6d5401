"""The benchmark history: what is a speed, what counts as slower, and which run is compared with which."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def history() -> ModuleType:
    spec = importlib.util.spec_from_file_location("history", ROOT / "benchmarks" / "history.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_speeds_of_the_committed_records_are_found(history: ModuleType) -> None:
    kernels = dict(history.figures(json.loads((ROOT / "results/kernels/cpu-2-threads.json").read_text()), "kernels"))
    lifecycle = dict(history.figures(json.loads((ROOT / "results/lifecycle/speed.json").read_text()), "lifecycle"))
    one = "kernels/rows/decode 4 x 2048, bfloat16/native_ms"
    assert history.slowdown(one, kernels[one], 2 * kernels[one]) == 2
    pages = "lifecycle/pool_pages_per_s/10000"
    assert history.slowdown(pages, lifecycle[pages], lifecycle[pages] / 4) == 4
    assert history.slowdown("kernels/schema_version", 1, 9) is None
    worse = history.slower(kernels, {**kernels, one: 1.6 * kernels[one]}, 1.5)
    assert [line.partition(":")[0] for line in worse] == [one]
    assert history.slower(kernels, {name: value / 3 for name, value in kernels.items()}, 1.5) == []


def test_runs_are_compared_on_one_machine_and_kept(
    history: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fake.py").write_text(
        "import json, os, sys\njson.dump({'step_ms': float(os.environ['STEP'])}, open(sys.argv[2], 'w'))\n"
    )
    monkeypatch.setattr(history, "HERE", tmp_path)
    monkeypatch.setattr(history, "SCRIPTS", {"fake": "--out"})
    file = tmp_path / "kept" / "history.jsonl"
    monkeypatch.setattr(sys, "argv", ["history.py", "--file", str(file)])
    codes = []
    for step in ("2.0", "2.5", "5.0"):
        monkeypatch.setenv("STEP", step)
        codes.append(history.main())
    monkeypatch.setattr(history.platform, "node", lambda: "another")
    codes.append(history.main())
    assert codes == [0, 0, 1, 0]
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "first run of this machine: nothing to compare with"
    assert out[1:3] == ["nothing slower", "fake/step_ms: 2.5 -> 5, 2.00 times slower"]
    assert out[3] == out[0]
    assert len(file.read_text().splitlines()) == 4
