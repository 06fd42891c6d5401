"""Where paged attention kernels broke elsewhere: window edges, nothing alive, poison, huge logits, program order."""

from dataclasses import replace

import pytest
import torch

from kvgate.kernels import reference
from kvgate.kernels.problems import Shape, make


@pytest.mark.slow
@pytest.mark.parametrize("shift", [-1, 0, 1])
@pytest.mark.parametrize("length", [15, 16, 17, 33])
def test_native_window_edges(backend, agree, length, shift):
    problem = make(Shape(((length, 1), (length, 1)), 1, native_window=16 + shift, keep=1.0), length)
    got = problem.decode(backend)
    agree(got, problem.exact())
    assert int((got.mass[0] > 0).sum()) == min(length, 16 + shift)
    problem = make(Shape(((length, min(length, 16)),), 1, native_window=16 + shift, keep=1.0), length)
    agree(problem.extend(backend), problem.exact())


@pytest.mark.parametrize("shift", [-1, 0, 1])
def test_lower_bound_edges(backend, agree, shift):
    problem = make(Shape(((33, 1),), 1, keep=1.0))
    lower = torch.tensor([16 + shift], dtype=torch.int32)
    problem = replace(problem, rules=replace(problem.rules, lower=lower))
    got = problem.decode(backend)
    agree(got, problem.exact())
    assert int((got.mass > 0).sum()) == 33 - 16 - shift


def test_span_edges_and_empty_spans(backend, agree):
    problem = make(Shape(((33, 1),), 1, keep=1.0))
    spans = torch.tensor([[[0, 4], [9, 9], [12, 3], [30, 31]]], dtype=torch.int32)
    lower = torch.tensor([32], dtype=torch.int32)
    problem = replace(problem, rules=replace(problem.rules, lower=lower, exempt_RE2=spans))
    got = problem.decode(backend)
    agree(got, problem.exact())
    assert int((got.mass > 0).sum()) == 4 + 1 + 1


def test_spans_do_not_widen_the_native_window(backend, agree):
    problem = make(Shape(((33, 1),), 1, keep=1.0, native_window=8))
    spans = torch.tensor([[[0, 4]]], dtype=torch.int32)
    lower = torch.tensor([0], dtype=torch.int32)
    problem = replace(problem, rules=replace(problem.rules, lower=lower, exempt_RE2=spans))
    got = problem.decode(backend)
    agree(got, problem.exact())
    assert int((got.mass > 0).sum()) == 8


@pytest.mark.slow
@pytest.mark.parametrize("edge", [0, 1, 8, 33])
def test_sink_edges(backend, agree, edge):
    problem = make(Shape(((33, 1), (40, 1)), keep=1.0, sinks=True))
    ends = torch.full((2,), edge, dtype=torch.int32)
    problem = replace(problem, rules=replace(problem.rules, sink_end_R=ends))
    agree(problem.decode(backend), problem.exact())
    agree(problem.extend(backend), problem.exact())


@pytest.mark.slow
def test_a_dead_row_among_living_ones(backend, agree):
    problem = make(Shape(((40, 1), (40, 1), (700, 1), (700, 1)), 1))
    live = problem.cache.live_RHP.clone()
    live[1], live[3] = 0, 0
    problem = replace(problem, cache=replace(problem.cache, live_RHP=live))
    for got in (problem.decode(backend), problem.extend(backend)):
        agree(got, problem.exact())
        assert torch.equal(got.out[1], torch.zeros_like(got.out[1]))
        assert bool((got.lse[[1, 3]] == float("-inf")).all())
        assert float(got.mass[[1, 3]].sum()) == 0


@pytest.mark.slow
def test_nothing_alive_anywhere(backend):
    problem = make(Shape(((600, 1), (40, 1))))
    cache = replace(problem.cache, live_RHP=torch.zeros_like(problem.cache.live_RHP))
    for got in (replace(problem, cache=cache).decode(backend), replace(problem, cache=cache).extend(backend)):
        assert float(got.out.abs().sum()) == 0
        assert bool((got.lse == float("-inf")).all())
        assert float(got.mass.sum()) == 0


def test_no_pages_at_all(backend):
    problem = make(Shape(((20, 1), (20, 1))))
    cache = replace(problem.cache, page_counts_RH=torch.zeros_like(problem.cache.page_counts_RH))
    for got in (replace(problem, cache=cache).decode(backend), replace(problem, cache=cache).extend(backend)):
        assert float(got.out.abs().sum()) == 0
        assert bool((got.lse == float("-inf")).all())


def test_a_split_with_nothing_alive_is_neutral(backend, agree):
    problem = make(Shape(((1300, 1),), 1))
    live = problem.cache.live_RHP.clone()
    live[:, :, 32:64] = 0  # the second of three splits of 512 slots
    problem = replace(problem, cache=replace(problem.cache, live_RHP=live))
    agree(problem.decode(backend), problem.exact())


def test_queries_before_everything_see_nothing(backend):
    problem = make(Shape(((30, 1), (30, 4))))
    problem = replace(problem, query_position_T=torch.full_like(problem.query_position_T, -1))
    got = problem.extend(backend)
    assert float(got.out.abs().sum()) == 0
    assert bool((got.lse == float("-inf")).all())
    assert float(got.mass.sum()) == 0


@pytest.mark.parametrize("filler", [float("nan"), float("inf"), 1e30])
def test_garbage_in_dead_slots_does_not_matter(backend, filler):
    problem = make(Shape(((50, 1), (31, 1)), keep=0.5))
    want = problem.decode(backend)
    pools = [torch.nan_to_num(pool, nan=filler) for pool in (problem.cache.k_pool_NSD, problem.cache.v_pool_NSD)]
    cache = replace(problem.cache, k_pool_NSD=pools[0], v_pool_NSD=pools[1])
    got = replace(problem, cache=cache).decode(backend)
    assert torch.equal(got.out, want.out)
    assert torch.equal(got.lse, want.lse)
    assert torch.equal(got.mass, want.mass)


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_logits_far_from_zero(backend, agree, sign):
    """All logits about -1e5 (and 1e5): no weight may vanish or overflow."""
    problem = make(Shape(((600, 1), (40, 1)), 1, 3, 64, 16))
    live_keys = torch.nan_to_num(problem.cache.k_pool_NSD * 1e-3, nan=float("nan")) + 1.0
    cache = replace(problem.cache, k_pool_NSD=live_keys)
    q = torch.full_like(problem.q_TQD, sign * 1e5 / 8.0)
    problem = replace(problem, q_TQD=q, cache=cache)
    want = problem.exact()
    assert float(want.lse.abs().min()) > 9e4
    for got in (problem.decode(backend), problem.extend(backend)):
        torch.testing.assert_close(got.lse.double(), want.lse, rtol=1e-6, atol=0)
        torch.testing.assert_close(got.mass.sum((2, 3)), torch.full((2, 1), 3.0), rtol=1e-4, atol=0)
        torch.testing.assert_close(got.out.double(), want.out, rtol=0.1, atol=0.1)  # fp32 logits of 1e5 carry 8e-3


def test_page_counts_differ_between_heads(backend, agree):
    problem = make(Shape(((90, 1), (90, 1))))
    counts = torch.tensor([[2, 6], [5, 1]], dtype=torch.int32)
    problem = replace(problem, cache=replace(problem.cache, page_counts_RH=counts))
    agree(problem.decode(backend), problem.exact())
    agree(problem.extend(backend), problem.exact())


def test_every_slot_of_32_alive(backend, agree):
    """A full word of 32 slots is the int32 -1: the sign bit is a slot like the others."""
    problem = make(Shape(((64, 1),), 1, page_size=32, keep=1.0))
    assert bool((problem.cache.live_RHP[:, :, :2] == -1).all())
    agree(problem.decode(backend), problem.exact())


@pytest.mark.slow
@pytest.mark.usefixtures("reversed_grid", "poisoned_memory")
def test_order_of_programs_and_fresh_memory_do_not_matter(agree):
    for shape in (
        Shape(((700, 1), (40, 1), (0, 0)), 2, lower=True, spans=1),
        Shape(((700, 40), (90, 3), (40, 1)), 1, sinks=True),
    ):
        problem = make(shape, 9)
        agree(problem.extend("triton"), problem.exact())
    decode = make(Shape(((700, 1), (40, 1)), 2, group=7, lower=True, spans=1))
    agree(decode.decode("triton"), decode.exact())


def test_shared_pages_with_own_live_words(backend, agree):
    """Forks: two rows read the same pages and keep different slots."""
    problem = make(Shape(((80, 1), (80, 1)), keep=1.0))
    cache = problem.cache
    tables, live = cache.tables_RHP.clone(), cache.live_RHP.clone()
    tables[1] = tables[0]
    live[0, :, :4] &= 0x5A5A
    live[1, :, :4] &= 0x0F33
    problem = replace(problem, cache=replace(cache, tables_RHP=tables, live_RHP=live))
    agree(problem.decode(backend), problem.exact())


def test_reference_against_a_dense_softmax():
    """The reference itself, against attention written without pages."""
    problem = make(Shape(((37, 37),), 1, 1, 16, 8, keep=1.0))
    cache = problem.cache
    k, v = torch.zeros(37, 16).double(), torch.zeros(37, 16).double()
    for page in range(5):
        for slot in range(8):
            page_id = int(cache.tables_RHP[0, 0, page])
            position = int(cache.positions_NS[page_id, slot])
            if position >= 0:
                k[position], v[position] = cache.k_pool_NSD[page_id, slot], cache.v_pool_NSD[page_id, slot]
    q = problem.q_TQD[:, 0].double()
    logits = (q @ k.T * 0.25).masked_fill(torch.ones(37, 37).triu(1).bool(), float("-inf"))
    got = problem.exact()
    torch.testing.assert_close(got.out[:, 0], torch.softmax(logits, -1) @ v)
    torch.testing.assert_close(got.lse[:, 0], torch.logsumexp(logits, -1))
    dense = reference.prefill(problem.q_TQD, k[:, None].float(), v[:, None].float(), problem.rules, True)
    torch.testing.assert_close(got.out, dense.out)
    torch.testing.assert_close(float(got.mass.sum()), float(dense.mass.sum()))
