"""Decode and extend of both backends against the float64 reference, over shapes, dtypes and rules."""

import pytest
import torch

from kvgate.kernels.problems import Shape, make

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Every head dim, group, page size and dtype, each at least twice and beside different partners.
SHAPES = [
    (40, 1, 8, FP32),
    (64, 2, 16, BF16),
    (80, 3, 32, FP16),
    (96, 5, 8, BF16),
    (128, 7, 16, FP32),
    (256, 8, 32, BF16),
    (40, 8, 16, FP16),
    (64, 3, 16, FP32),
    (80, 7, 8, BF16),
    (96, 1, 32, FP32),
    (128, 2, 32, FP16),
    (256, 5, 16, FP32),
]
LENGTHS = (0, 1, 17, 64, 95)


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "group", "size", "dtype"), SHAPES)
def test_decode_over_shapes(backend, agree, dim, group, size, dtype):
    rows = tuple((length, min(1, length)) for length in LENGTHS if length)
    problem = make(Shape(rows, 2, group, dim, size, dtype), seed=dim + group)
    agree(problem.decode(backend), problem.exact())


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "group", "size", "dtype"), SHAPES)
def test_extend_over_shapes(backend, agree, dim, group, size, dtype):
    problem = make(Shape(((5, 5), (33, 2), (0, 0), (41, 10)), 1, group, dim, size, dtype), seed=dim + group)
    agree(problem.extend(backend), problem.exact())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_all_rules_at_once(backend, agree, dtype, seed):
    rules = {"lower": True, "spans": 2, "sinks": True, "native_window": 40 + seed, "softcap": 5.0}
    problem = make(Shape(((50, 1), (31, 1), (70, 1)), dtype=dtype, **rules), seed)
    agree(problem.decode(backend), problem.exact())
    problem = make(Shape(((50, 9), (31, 31), (70, 1)), dtype=dtype, **rules), seed)
    agree(problem.extend(backend), problem.exact())


@pytest.mark.parametrize(
    "rule",
    [{"lower": True}, {"lower": True, "spans": 3}, {"sinks": True}, {"native_window": 7}, {"softcap": 2.0}],
    ids=lambda rule: "-".join(rule),
)
def test_each_rule_alone(backend, agree, rule):
    decode = make(Shape(((40, 1), (23, 1)), **rule), 3)
    agree(decode.decode(backend), decode.exact())
    extend = make(Shape(((40, 12), (23, 3)), **rule), 4)
    agree(extend.extend(backend), extend.exact())


def test_rows_longer_than_a_split(backend, agree):
    problem = make(Shape(((1100, 1), (512, 1), (513, 1), (3, 1)), 1, 3, 64, 16, keep=0.9, spans=1, lower=True))
    agree(problem.decode(backend), problem.exact())


@pytest.mark.slow
def test_more_splits_than_the_merge_takes_at_once(backend, agree):
    """Sixteen splits hold 8,192 slots; the largest logits lie in the seventeenth."""
    problem = make(Shape(((8300, 1),), 1, 3, 40, 32, keep=0.9))
    cache = problem.cache
    last = cache.tables_RHP[0, 0, 8192 // 32 : int(cache.page_counts_RH[0, 0])].long()
    cache.k_pool_NSD[last] *= 8.0
    agree(problem.decode(backend), problem.exact())


@pytest.mark.slow
def test_question_chunk_longer_than_a_split(backend, agree):
    problem = make(Shape(((2100, 9), (700, 4)), 1, 3, 40, 32, keep=0.9))
    agree(problem.extend(backend), problem.exact())


@pytest.mark.slow
def test_many_tiles_over_a_scanned_range(backend, agree):
    problem = make(Shape(((1200, 100), (150, 150)), 1, 2, 40, 32, native_window=300))
    agree(problem.extend(backend), problem.exact())


@pytest.mark.slow
def test_mass_sums_to_the_group(backend):
    problem = make(Shape(((90, 1), (33, 1)), group=5))
    mass = problem.decode(backend).mass
    torch.testing.assert_close(mass.sum((2, 3)), torch.full((2, 2), 5.0), rtol=1e-5, atol=0)
    problem = make(Shape(((90, 30), (33, 4)), group=7))
    mass = problem.extend(backend).mass
    want = torch.tensor([[30.0 * 7] * 2, [4.0 * 7] * 2])
    torch.testing.assert_close(mass.sum((2, 3)), want, rtol=1e-5, atol=0)


@pytest.mark.slow
def test_mass_is_optional_and_changes_nothing(backend):
    problem = make(Shape(((90, 30), (33, 4))))
    with_mass, without = problem.extend(backend), problem.extend(backend, want_mass=False)
    assert without.mass is None
    assert torch.equal(with_mass.out, without.out)
    assert torch.equal(with_mass.lse, without.lse)


@pytest.mark.slow
def test_same_call_same_bits(backend):
    problem = make(Shape(((90, 30), (33, 4)), dtype=BF16))
    first, second = problem.extend(backend), problem.extend(backend)
    assert torch.equal(first.out, second.out)
    assert torch.equal(first.lse, second.lse)
    assert torch.equal(first.mass, second.mass)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["decode", "extend"])
def test_a_row_does_not_depend_on_its_batch(backend, kind):
    tokens = (1, 1, 1, 1, 1) if kind == "decode" else (1, 4, 30, 70, 9)
    held = (600, 75, 130, 90, 12)
    problem = make(Shape(tuple(zip(held, tokens, strict=True)), 1, lower=True, spans=1, sinks=True), 5)
    whole = getattr(problem, kind)(backend)
    for row in range(5):
        alone = getattr(problem.rows([row]), kind)(backend)
        own = slice(problem.row_start[row], problem.row_start[row + 1])
        if backend in ("triton", "native"):
            assert torch.equal(alone.out, whole.out[own])
            assert torch.equal(alone.lse, whole.lse[own])
            assert torch.equal(alone.mass[0], whole.mass[row])
        else:
            torch.testing.assert_close(alone.out, whole.out[own], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(alone.mass[0], whole.mass[row], rtol=1e-5, atol=1e-6)


def test_an_empty_launch(backend):
    problem = make(Shape(((20, 1),)))
    nothing = problem.rows([])
    assert nothing.decode(backend).out.shape == (0, 6, 64)
    assert nothing.extend(backend).mass.shape[0] == 0


def test_strided_tables_and_queries(backend, agree):
    """Views as an engine cuts them out of larger tensors."""
    problem = make(Shape(((50, 1), (31, 1))))
    cache = problem.cache
    wide = torch.zeros((2, 4, 2, cache.tables_RHP.shape[2] + 3), dtype=torch.int32)
    views = []
    for value in (cache.tables_RHP, cache.live_RHP):
        holder = wide.clone()
        holder[:, 2, :, : value.shape[2]] = value
        views.append(holder[:, 2, :, : value.shape[2]])
    q = torch.randn(2, 6, 3, 64)[:, :, 1]
    q.copy_(problem.q_TQD)
    from dataclasses import replace

    strided = replace(problem, q_TQD=q, cache=replace(cache, tables_RHP=views[0], live_RHP=views[1]))
    agree(strided.decode(backend), problem.exact())
    agree(strided.extend(backend), problem.exact())
