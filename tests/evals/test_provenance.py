"""What a record says about the code it was made with."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvgate
from kvgate.evals.run.provenance import code_hash


@pytest.mark.parametrize("name, counts", [("ops.py", True), ("decode.c", True), ("lanes.h", True), ("notes.md", False)])
def test_the_code_hash_sees_what_decides_results(
    name: str, counts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvgate, "__file__", str(tmp_path / "__init__.py"))
    (tmp_path / "kernels").mkdir()
    file = tmp_path / "kernels" / name
    file.write_text("one")
    before = code_hash.__wrapped__()
    file.write_text("two")
    assert (code_hash.__wrapped__() != before) == counts
