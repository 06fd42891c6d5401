"""`python -m kvgate.kernels.check`: it runs to its end here, sees what is wrong, and says what is not there."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from kvgate.kernels import check, ops

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other files compare the interpreted kernels with the same reference, in more shapes."""
    monkeypatch.setattr(ops, "interpreted", lambda: False)


def test_a_device_that_is_not_there_is_named():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    command = [sys.executable, "-m", "kvgate.kernels.check", "--device", "cuda"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.strip() == "no CUDA device here: use --device cpu --small"


@pytest.mark.slow
def test_the_small_check_finds_nothing_wrong_and_writes_its_record(tmp_path, monkeypatch, capsys):
    out = tmp_path / "check.json"
    monkeypatch.setattr(sys, "argv", ["check", "--device", "cpu", "--small", "--no-speed", "--out", str(out)])
    assert check.main() == 0
    record = json.loads(out.read_text())
    operations = {"decode", "extend", "prefill", "moves"}
    assert {finding["operation"] for finding in record["findings"]} == operations
    assert {finding["backend"] for finding in record["findings"]} >= {"native", "torch"}
    assert all(finding["right"] for finding in record["findings"])
    assert record["speeds"] == []
    assert "0 wrong" in capsys.readouterr().out


@pytest.mark.parametrize("broken", ["out", "lse", "mass"])
def test_a_wrong_result_ends_with_exit_code_1_and_is_not_timed(broken, monkeypatch, capsys):
    honest = ops.decode_attention

    def wrong(*args, **kwargs):
        found = honest(*args, **kwargs)
        value = getattr(found, broken).clone()
        value.view(-1)[-1] = float("nan") if broken == "out" else 1.0
        return replace(found, **{broken: value})

    monkeypatch.setattr(ops, "decode_attention", wrong)
    monkeypatch.setattr(check, "shapes", lambda small, all_shapes=check.shapes: list(all_shapes(small))[:1])
    monkeypatch.setattr(sys, "argv", ["check", "--device", "cpu", "--small"])
    assert check.main() == 1
    shown = capsys.readouterr().out
    assert "WRONG Finding(operation='decode'" in shown
    assert "GB/s" not in shown


def test_speeds_are_measured_beside_their_references():
    from kvgate.kernels import speed

    model = speed.MODELS[-1]
    rows = list(speed.decode_speeds(CPU, "native", torch.float32, (model,), [(1, 64)]))
    rows += list(speed.prefill_speeds(CPU, "native", torch.float32, (model,), [32]))
    assert {row.operation for row in rows} == {"decode", "decode with mass", "prefill", "prefill with mass"}
    assert all(row.ms > 0 and row.reference_ms > 0 and row.flashinfer_ms is None for row in rows)
    assert {row.operation for row in speed.move_speeds(CPU, "native", torch.float32, (model,), 2, 64)} == {
        "append",
        "compaction",
        "page copy",
    }
