"""The compile gate: a sample compiled here for sm_80 and sm_90, and the recorded run of all configurations."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvgate.kernels import tiles

RECORDS = Path(__file__).resolve().parents[2] / "results" / "kernels"


def compiles_here() -> bool:
    try:
        import triton
    except ImportError:
        return False
    return (Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump").exists()


needs_compiler = pytest.mark.skipif(not compiles_here(), reason="this triton ships no CUDA compiler")


def gate(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "kvgate.kernels.compile_gate", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)


@needs_compiler
@pytest.mark.slow
def test_a_sample_compiles_without_faults(tmp_path):
    out = tmp_path / "gate.json"
    done = gate("--only", "head_dim=64, dtype='bf16', group=3, page_size=16, features='lower+sink", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    records = json.loads(out.read_text())["records"]
    assert {record["kernel"] for record in records} == {"attend", "merge", "score_mass", "column_mass", "move"}
    assert {record["arch"] for record in records} == {80, 90}
    assert any(record["mma"].startswith("wgmma") for record in records)


@needs_compiler
@pytest.mark.slow
def test_the_gate_refuses_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "kvgate.kernels.compile_gate", "--only", "nothing"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "TRITON_INTERPRET is set" in done.stderr


@pytest.mark.parametrize("path", sorted(RECORDS.glob("compile-*.json")), ids=lambda path: path.stem)
def test_recorded_runs_cover_all_configurations_and_have_no_faults(path):
    """Whether they are of today's sources is told by `make check-records`: every edit would cost half an hour."""
    from kvgate.kernels import gate_records

    run = json.loads(path.read_text())
    assert len(run["source_hash"]) == len(gate_records.source_hash())
    assert int(run["source_hash"], 16) >= 0
    records = [gate_records.Compiled(**record) for record in run["records"]]
    assert {record.arch for record in records} == {80, 90}
    for name, values in {
        "head_dim": {40, 64, 80, 96, 128, 256},
        "dtype": {"bf16", "fp16", "fp32"},
        "group": {1, 2, 3, 4, 5, 7, 8},
        "page_size": {8, 16, 32},
    }.items():
        assert {record.case[name] for record in records} == values
    assert [(record.case, fault) for record in records for fault in record.faults()] == []


def test_kind_of_a_row_depends_on_its_own_tokens():
    assert tiles.kind_of(1, 71) == "decode"
    assert tiles.kind_of(5, 3) == "decode"
    assert tiles.kind_of(6, 3) == "short"
    assert tiles.kind_of(64, 1) == "short"
    assert tiles.kind_of(22, 3) == "long"


@pytest.mark.parametrize("group", [1, 3, 16, 17, 40, 71])
def test_a_tile_holds_the_group(group):
    for kind in ("decode", "short", "long"):
        for dim in (40, 64, 80, 96, 128, 256):
            for size in (2, 4):
                tile = tiles.attention_tile(kind, dim, group, size, True, True, dim < 100)
                assert tile.block_m >= max(16, group)
                assert tile.block_d >= dim
                assert tile.split % tile.block_n == 0


@pytest.mark.parametrize(("found", "code"), [(None, 0), ("0" * 16, 1)])
def test_stale_records_are_named(tmp_path, found, code):
    from kvgate.kernels import gate_records

    body = {"source_hash": found or gate_records.source_hash(), "records": []}
    (tmp_path / "compile-9.9.json").write_text(json.dumps(body))
    script = Path(__file__).with_name("check_records.py")
    done = subprocess.run([sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    assert ("compile-9.9.json is of other sources" in done.stdout) is (code == 1)
