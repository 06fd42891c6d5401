"""Prefill of an empty cache: against the reference, and against extend over pages."""

import pytest
import torch

from kvgate.kernels import ops, reference
from kvgate.kernels.types import Attention, Rules

SIZES = [(1, 3, 64), (63, 2, 40), (65, 7, 96), (130, 1, 128), (33, 5, 256)]


def inputs(tokens, heads, group, dim, dtype, seed=0):
    random = torch.Generator().manual_seed(seed)
    q = torch.randn((tokens, heads * group, dim), generator=random).to(dtype)
    k, v = (torch.randn((tokens, heads, dim), generator=random).to(dtype) for _ in range(2))
    return q, k, v


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "group", "dim"), SIZES)
def test_prefill(backend, agree, tokens, group, dim, dtype):
    q, k, v = inputs(tokens, 2, group, dim, dtype)
    for want_mass in (True, False):
        got = ops.prefill_attention(q, k, v, scale=dim**-0.5, want_mass=want_mass, backend=backend)
        want = reference.prefill(q, k, v, Rules(dim**-0.5), want_mass)
        agree(got, want)
        assert (got.mass is None) is not want_mass


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 31, 32, 33, 64, 100, 1000])
def test_prefill_in_a_window(backend, agree, window):
    q, k, v = inputs(100, 1, 3, 64, torch.float32)
    for want_mass in (True, False):
        got = ops.prefill_attention(q, k, v, scale=0.125, native_window=window, want_mass=want_mass, backend=backend)
        agree(got, reference.prefill(q, k, v, Rules(0.125, native_window=window), want_mass))


@pytest.mark.parametrize("window", [None, 1, 129, 200])
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_prefill_of_several_query_blocks(agree, backend, window):
    q, k, v = inputs(300, 2, 3, 32, torch.float32)
    got = ops.prefill_attention(q, k, v, scale=0.2, native_window=window, want_mass=True, backend=backend)
    agree(got, reference.prefill(q, k, v, Rules(0.2, native_window=window), True))


def test_prefill_with_a_soft_cap(backend, agree):
    q, k, v = inputs(70, 1, 3, 64, torch.float32)
    got = ops.prefill_attention(q, k, v, scale=0.5, softcap=3.0, want_mass=True, backend=backend)
    agree(got, reference.prefill(q, k, v, Rules(0.5, softcap=3.0), True))


def test_prefill_takes_slices_of_a_fused_projection(backend, agree):
    fused = torch.randn(40, 10, 16)
    q, k, v = fused[:, :6], fused[:, 6:8], fused[:, 8:]
    got = ops.prefill_attention(q, k, v, scale=0.25, want_mass=True, backend=backend)
    agree(got, reference.prefill(q, k, v, Rules(0.25), True))


def test_prefill_of_nothing(backend):
    q, k, v = inputs(0, 2, 3, 64, torch.float32)
    got = ops.prefill_attention(q, k, v, scale=0.125, want_mass=True, backend=backend)
    assert got.out.shape == (0, 6, 64)
    assert got.mass.shape == (2, 0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_is_extend_on_an_empty_cache(backend, agree, dtype):
    q, k, v = inputs(90, 2, 3, 64, dtype)
    pages = 12
    pool = torch.full((pages, 16, 64), float("nan"), dtype=dtype)
    pools = (pool, pool.clone(), torch.zeros((pages, 16), dtype=torch.int32))
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).view(1, 2, 6)
    position = torch.arange(90, dtype=torch.int32)
    slots = order[0].t()[position.long() // 16] * 16 + position[:, None] % 16
    ops.append_kv(k, v, position, slots.long(), *pools, backend=backend)
    live = torch.full((1, 2, 6), 0xFFFF, dtype=torch.int32)
    live[:, :, 5] = 0x3FF
    counts = torch.full((1, 2), 6, dtype=torch.int32)
    arguments = (q, *pools[:2], order.int(), live, counts, pools[2], position)
    starts = torch.tensor([0, 90], dtype=torch.int32)
    paged = ops.extend_attention(*arguments, starts, scale=0.125, want_mass=True, backend=backend)
    mass = paged.mass.view(2, 96)[:, :90]
    agree(Attention(paged.out, paged.lse, mass), reference.prefill(q, k, v, Rules(0.125), True))
    whole = ops.prefill_attention(q, k, v, scale=0.125, want_mass=True, backend=backend)
    close = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(whole.out.float(), paged.out.float(), rtol=1e-2, atol=close)
    torch.testing.assert_close(whole.lse, paged.lse, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole.mass, mass, rtol=1e-4, atol=1e-5)
