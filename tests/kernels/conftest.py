"""Fixtures of the kernel tests: comparison with the float64 reference, and hostile ways to run Triton's interpreter."""

from collections.abc import Callable, Iterator

import pytest
import torch

from kvgate.kernels import native
from kvgate.kernels.types import Attention

# Worst absolute error of out for values of about 1; lse and mass are fp32 whatever the dtype.
OUT_TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
FP32_TOLERANCE = 3e-5
LSE_TOLERANCE = {torch.float32: 3e-5, torch.float16: 2e-4, torch.bfloat16: 2e-4}  # torch's flash has a coarse exp


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Small tensors only: threads would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["torch", "triton", "native"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "native" and native.library() is None:
        pytest.skip("no C compiler here: the native backend is plain torch")
    if request.param == "triton":
        pytest.importorskip("triton", reason="the Triton backend needs triton")
    return request.param


@pytest.fixture
def agree() -> Callable[[Attention, Attention], None]:
    """Asserts that a result is the reference's: finite, the same -inf, zero mass where nothing is seen."""

    def check(got: Attention, want: Attention) -> None:
        assert got.lse.dtype == torch.float32
        torch.testing.assert_close(got.out.double(), want.out, rtol=1e-2, atol=OUT_TOLERANCE[got.out.dtype])
        torch.testing.assert_close(got.lse.double(), want.lse, rtol=1e-5, atol=LSE_TOLERANCE[got.out.dtype])
        if got.mass is not None:
            assert want.mass is not None
            assert got.mass.dtype == torch.float32
            assert torch.equal(got.mass == 0, want.mass == 0) or float(got.mass[want.mass == 0].abs().sum()) == 0
            torch.testing.assert_close(got.mass.double(), want.mass, rtol=1e-4, atol=FP32_TOLERANCE)

    return check


@pytest.fixture
def reversed_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs run last to first: what in-order runs hide becomes wrong."""
    from triton.runtime.interpreter import interpreter_builder

    forward = interpreter_builder.set_grid_idx

    def backward(x: int, y: int, z: int) -> None:
        gx, gy, gz = interpreter_builder.grid_dim
        forward(gx - 1 - x, gy - 1 - y, gz - 1 - z)

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", backward)


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds NaN: a result that reads what nobody wrote is wrong."""
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        made = empty(*args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)
