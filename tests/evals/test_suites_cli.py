"""``kvgate suites``."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from kvgate.cli import main
from kvgate.evals.suites.catalog import HUB, catalog


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_every_suite_says_where_it_comes_from_and_its_floor(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["suites"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert max(len(line) for line in lines) <= min(columns, 100)
    unwrapped = " ".join(text.split())
    for name, suite in catalog().items():
        block = unwrapped[unwrapped.index(f" {name}: ") if f" {name}: " in unwrapped else 0 :]
        assert " ".join(f"source: {suite.origin()} floor: {suite.floor:g};".split()) in block
    for found in HUB:  # whole, so that it can be copied
        assert found.source.revision is not None
        assert any(found.source.revision in line for line in lines)


def test_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["suites", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["longbench2"]["floor"] == 0.35
    assert "licence: apache-2.0" in found["longbench2"]["origin"]
    assert found["hub_ruler"]["tasks"]["8192"]["optional"]


def test_a_reader_that_stops_early_is_no_error() -> None:
    """As in ``kvgate suites | head -1``."""
    command = [sys.executable, "-m", "kvgate", "suites"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141
