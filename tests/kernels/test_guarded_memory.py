"""Arguments that end, or start, where memory ends: whatever reads past them is killed by the kernel of the system."""

import subprocess
import sys
import textwrap

import pytest

from kvgate.kernels import native

SCRIPT = textwrap.dedent(
    """
    import os, sys
    os.environ["TRITON_INTERPRET"] = "1"
    import ctypes, itertools, mmap
    from dataclasses import fields, replace
    import torch
    from kvgate.kernels import native, ops, reference
    from kvgate.kernels.problems import Shape, make
    from kvgate.kernels.types import Rules

    backend, side = sys.argv[1:]
    torch.set_num_threads(1)
    libc, regions = ctypes.CDLL(None, use_errno=True), []

    def guarded(value):
        \"\"\"A copy between two pages that nobody may touch, close to one of them.\"\"\"
        size, page = value.numel() * value.element_size(), mmap.PAGESIZE
        room = -(-size // page) * page
        region = mmap.mmap(-1, room + 2 * page)
        base = ctypes.addressof(ctypes.c_char.from_buffer(region))
        for start in (base, base + page + room):
            assert libc.mprotect(ctypes.c_void_p(start), ctypes.c_size_t(page), 0) == 0
        regions.append(region)
        offset = page + (room - size if side == "end" else 0)
        flat = torch.frombuffer(region, dtype=value.dtype, count=value.numel(), offset=offset)
        return flat.copy_(value.reshape(-1)).view(value.shape)

    def moved(record):
        values = {field.name: getattr(record, field.name) for field in fields(record)}
        return replace(record, **{name: guarded(v) for name, v in values.items() if isinstance(v, torch.Tensor)})

    dtypes = (torch.float32, torch.bfloat16) if backend == "native" else (torch.float32,)  # compiled apart

    def agree(got, want):
        for name in ("out", "lse", "mass"):
            close = 3e-2 if getattr(got, name).dtype == torch.bfloat16 else 1e-4
            torch.testing.assert_close(getattr(got, name).double(), getattr(want, name), rtol=close, atol=close)

    rules = {"lower": True, "spans": 2, "sinks": True}
    shapes = (
        Shape(((37, 1), (1, 1)), 1, 3, 48, 16),
        Shape(((37, 1), (90, 1)), 2, 2, 32, 8, **rules),
        Shape(((37, 30), (5, 2)), 1, 3, 48, 16, native_window=9),
        Shape(((37, 30), (90, 1)), 2, 2, 32, 32, **rules),
    )
    for shape, dtype in itertools.product(shapes, dtypes):
        problem = make(replace(shape, dtype=dtype))
        hard = replace(
            problem,
            q_TQD=guarded(problem.q_TQD),
            cache=moved(problem.cache),
            query_position_T=guarded(problem.query_position_T),
            rules=moved(problem.rules),
        )
        agree(hard.extend(backend), problem.exact())
        if all(new == 1 for _, new in shape.rows):
            agree(hard.decode(backend), problem.exact())
    for window, dtype in itertools.product((None, 7), dtypes):
        q, k, v = (guarded(torch.randn(45, heads, 48).to(dtype)) for heads in (6, 2, 2))
        got = ops.prefill_attention(q, k, v, scale=0.2, native_window=window, want_mass=True, backend=backend)
        agree(got, reference.prefill(q, k, v, Rules(0.2, native_window=window), True))
    pools = (guarded(torch.randn(5, 16, 40)), guarded(torch.randn(5, 16, 40)), guarded(torch.zeros(5, 16).int()))
    last = guarded(torch.tensor([79, 0, 64]))
    ops.copy_slots(last, guarded(torch.tensor([1, 78, 2])), *pools, backend=backend)
    ops.append_kv(
        *(guarded(torch.randn(3, 1, 40)) for _ in range(2)), guarded(torch.arange(3).int()), last.view(3, 1), *pools,
        backend=backend,
    )
    ids = guarded(torch.tensor([4, 0], dtype=torch.int32))
    ops.copy_pages(ids, guarded(torch.tensor([1, 2], dtype=torch.int32)), *pools, backend=backend)
    held = tuple(guarded(x) for x in ops.gather_pages(ids, *pools, backend=backend))
    ops.scatter_pages(ids, *held, *pools, backend=backend)
    print("reached the end")
    """
)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="guards its memory with mprotect")
@pytest.mark.parametrize("side", ["end", "start"])
@pytest.mark.parametrize("backend", ["torch", "triton", "native"])
def test_nothing_is_read_past_its_end(backend, side):
    if backend == "native" and native.library() is None:
        pytest.skip("no C compiler here: the native backend is plain torch")
    done = subprocess.run([sys.executable, "-c", SCRIPT, backend, side], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "reached the end" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="guards its memory with mprotect")
def test_the_guard_guards():
    code = SCRIPT.partition("def moved")[0] + "address = guarded(torch.zeros(8)).data_ptr()\n"
    code += "print('before', flush=True)\nctypes.string_at(address + 32, 1)\nprint('after')\n"
    done = subprocess.run([sys.executable, "-c", code, "torch", "end"], capture_output=True, text=True, timeout=300)
    assert done.returncode < 0
    assert done.stdout == "before\n"
