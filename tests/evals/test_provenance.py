"""What a record says about the code it was made with."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvgate
from kvgate.evals.run.provenance import _READING, code_hash, machine

OUTCOME, READING, NEITHER = "outcome", "reading", "neither"


@pytest.mark.parametrize(
    "name, counts_as",
    [
        ("kernels/ops.py", OUTCOME),
        ("kernels/decode.c", OUTCOME),
        ("kernels/lanes.h", OUTCOME),
        ("kernels/notes.md", NEITHER),
        ("compressors/h2o.py", OUTCOME),
        ("evals/run/runner.py", OUTCOME),
        ("evals/scoring/scores.py", OUTCOME),
        ("evals/judge/rules.py", READING),
        ("evals/report/page.py", READING),
        ("evals/leaderboard/board.py", READING),
        ("lifecycle/pool.py", OUTCOME),
        ("lifecycle/lab/report.py", READING),
        ("cli/show.py", NEITHER),
    ],
)
def test_the_code_hash_sees_what_decides_results_and_the_other_what_reads_them(
    name: str, counts_as: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvgate, "__file__", str(tmp_path / "__init__.py"))
    file = tmp_path / name
    file.parent.mkdir(parents=True)
    file.write_text("one")
    before = [code_hash.__wrapped__(reading=reading) for reading in (False, True)]
    file.write_text("two")
    after = [code_hash.__wrapped__(reading=reading) for reading in (False, True)]
    assert [was != now for was, now in zip(before, after, strict=True)] == [counts_as == OUTCOME, counts_as == READING]


def test_every_room_counts_as_one_of_the_two() -> None:
    """A folder that is renamed must not fall out of the list of what only reads."""
    root = Path(kvgate.__file__).parent
    assert all((root / part).exists() for part in _READING)


def test_the_machine_says_how_it_multiplies() -> None:
    found = machine()
    assert found["matrix_products"].keys() >= {"blas", "onednn", "torch_capability"}
    if found["system"] == "Linux":
        assert found["instruction_sets"]
