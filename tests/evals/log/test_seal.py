"""The chain of a finished run: no byte of it changes unseen."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvgate.evals.log.names import CHECKS, MANIFEST, SAMPLES, SEAL, STOP
from kvgate.evals.log.run_folder import write_seal
from kvgate.evals.log.seal import BLOCK, require_sealed, seal_of

LINES = [f'{{"cell": {number}}}' for number in range(2 * BLOCK + 3)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / MANIFEST).write_text("{}\n")
    (tmp_path / CHECKS).write_text("{}\n")
    (tmp_path / STOP).write_text("{}\n")
    (tmp_path / SAMPLES).write_text("\n".join(LINES) + "\n")
    write_seal(tmp_path)
    return tmp_path


def test_a_sealed_folder_is_read_and_its_seal_counts_the_lines(folder: Path) -> None:
    sealed = require_sealed(folder)
    assert sealed == seal_of(folder)
    assert (sealed.records, len(sealed.blocks)) == (len(LINES), 3)


@pytest.mark.parametrize("name", [MANIFEST, CHECKS, STOP, SAMPLES])
def test_any_byte_of_any_file_counts(folder: Path, name: str) -> None:
    data = bytearray((folder / name).read_bytes())
    for place in range(0, len(data) - 1, 37):
        changed = bytearray(data)
        changed[place] ^= 1
        (folder / name).write_bytes(changed)
        with pytest.raises(ValueError, match="not as it was when the run was finished"):
            require_sealed(folder)


@pytest.mark.parametrize(
    "edit, says",
    [
        (lambda lines: lines[:-1], "has 514 lines, was sealed with 515"),
        (lambda lines: [*lines, lines[0]], "has 516 lines"),
        (lambda lines: [lines[1], lines[0], *lines[2:]], "from 1 to 256"),
        (lambda lines: [*lines[:300], "{}", *lines[301:]], "from 257 to 512"),
        (lambda lines: [*lines[:-1], "{}"], "from 513 to 515"),
    ],
)
def test_what_changed_is_told_where(folder: Path, edit: object, says: str) -> None:
    (folder / SAMPLES).write_text("\n".join(edit(LINES)) + "\n")  # type: ignore[operator]
    with pytest.raises(ValueError, match=says):
        require_sealed(folder)


def test_a_stop_that_was_taken_away_or_checks_that_were_edited(folder: Path) -> None:
    (folder / STOP).unlink()
    with pytest.raises(ValueError, match=r"checks\.json or stop\.json was changed"):
        require_sealed(folder)


def test_without_a_seal_a_run_is_not_finished(folder: Path) -> None:
    (folder / SEAL).unlink()
    with pytest.raises(ValueError, match="finish the run"):
        require_sealed(folder)
    (folder / SEAL).write_text('{"records": 515}')
    with pytest.raises(ValueError, match="missing"):
        require_sealed(folder)
