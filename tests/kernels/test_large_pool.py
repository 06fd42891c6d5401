"""Pools beyond 2**31 elements: 32-bit offsets would crash, so each backend runs in its own process."""

import subprocess
import sys
import textwrap

import pytest

SCRIPT = textwrap.dedent(
    """
    import os, sys
    os.environ["TRITON_INTERPRET"] = "1"
    import torch
    from kvgate.kernels import ops
    from dataclasses import replace
    from kvgate.kernels.problems import Shape, make

    backend = sys.argv[1]
    problem = make(Shape(((40, 6), (33, 1)), 1, 2, 64, 16, torch.bfloat16))
    small = problem.cache
    pages = (2**31) // (16 * 64) + 5000
    base = pages - 4000  # every used page lies beyond element 2**31
    k, v = (torch.empty((pages, 16, 64), dtype=torch.bfloat16) for _ in range(2))  # never touched, so never backed
    positions = torch.empty((pages, 16), dtype=torch.int32)
    count = small.k_pool_NSD.shape[0]
    k[base : base + count], v[base : base + count] = small.k_pool_NSD, small.v_pool_NSD
    positions[base : base + count] = small.positions_NS
    cache = replace(small, k_pool_NSD=k, v_pool_NSD=v, positions_NS=positions, tables_RHP=small.tables_RHP + base)
    far = replace(problem, cache=cache)
    got, want = far.extend(backend), problem.extend(backend)
    assert torch.equal(got.out, want.out) and torch.equal(got.mass, want.mass)
    rows = far.rows([1]), problem.rows([1])
    got, want = (side.decode(backend) for side in rows)
    assert torch.equal(got.out, want.out) and torch.equal(got.mass, want.mass)
    slot = torch.tensor([[(pages - 1) * 16 + 15]])
    new = torch.full((1, 1, 64), 3.0, dtype=torch.bfloat16)
    ops.append_kv(new, new, torch.tensor([77], dtype=torch.int32), slot, k, v, positions, backend=backend)
    assert float(k[-1, 15].float().sum()) == 192.0 and int(positions[-1, 15]) == 77
    ops.copy_slots(slot.view(-1), slot.view(-1) - 3, k, v, positions, backend=backend)
    assert float(v[-1, 12].float().sum()) == 192.0 and int(positions[-1, 12]) == 77
    last = torch.tensor([pages - 1], dtype=torch.int32)
    ops.copy_pages(last, last - 7, k, v, positions, backend=backend)
    assert float(v[-8, 12].float().sum()) == 192.0
    assert float(ops.gather_pages(last - 7, k, v, positions, backend=backend)[0][0, 15].float().sum()) == 192.0
    print("reached the end")
    """
)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_pool_beyond_two_billion_elements(backend):
    done = subprocess.run([sys.executable, "-c", SCRIPT, backend], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "reached the end" in done.stdout
