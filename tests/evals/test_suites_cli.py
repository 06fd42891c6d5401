"""``kvgate suites``."""

from __future__ import annotations

import argparse
import errno
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvgate.cli import suites as suites_cli
from kvgate.cli.main import main
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
    for name, suite in catalog()[0].items():
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


def run_into(stdout: int, arguments: Sequence[str], unbuffered: str = "") -> tuple[int, str]:
    """Exit code and stderr of a command that writes to this file descriptor."""
    command = [sys.executable, "-m", "kvgate", *arguments]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    return done.returncode, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "command", ["suites", "power --gate screen --cap 50", "prove --replicates 1 --cap 20 --out OUT"]
)
def test_a_reader_that_stops_early_is_no_error(command: str, unbuffered: str, tmp_path: Path) -> None:
    """As in ``kvgate suites | head -1``; 1 would say that a gate was not passed."""
    reader, writer = os.pipe()
    os.close(reader)
    arguments = [str(tmp_path) if word == "OUT" else word for word in command.split()]
    code, errors = run_into(writer, arguments, unbuffered)
    os.close(writer)
    assert (code, errors.strip()) == (141, "")  # prove ends its progress bar with a line


@pytest.mark.slow
def test_help_into_a_closed_pipe() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    assert run_into(writer, ["--help"]) == (141, "")
    os.close(writer)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["suites", "power --gate screen --cap 50"])
def test_a_full_disk_is_one_line(command: str, unbuffered: str) -> None:
    with Path("/dev/full").open("wb") as full:
        code, errors = run_into(full.fileno(), command.split(), unbuffered)
    assert code == 2
    assert errors == "kvgate: standard output: No space left on device; send it elsewhere, as in `> FILE`\n"


@pytest.mark.slow
@pytest.mark.parametrize("command", ["suites", "power --gate screen --cap 50"])
def test_a_closed_standard_output_is_one_line(command: str) -> None:
    shell = ["sh", "-c", f'exec "$0" -m kvgate {command} >&-', sys.executable]
    done = subprocess.run(shell, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "kvgate: standard output: closed; send it somewhere, as in `> /dev/null`\n"


@pytest.mark.parametrize(
    "fault", [BrokenPipeError(errno.EPIPE, "of a socket"), OSError(errno.ENOSPC, "of a results file")]
)
def test_a_fault_elsewhere_is_not_taken_for_standard_output(
    fault: OSError, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_: argparse.Namespace) -> int:
        raise fault

    monkeypatch.setattr(suites_cli, "main", fails)
    assert main(["suites"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "standard output" not in line
    assert str(fault.strerror) in line
