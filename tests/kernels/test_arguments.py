"""Bad arguments: one clear ValueError naming the argument, before anything runs."""

from dataclasses import replace

import pytest
import torch

from kvgate.kernels import ops
from kvgate.kernels.problems import Shape, make


@pytest.fixture
def problem():
    return make(Shape(((20, 1), (9, 1))))


def change(problem, **values):
    """The problem with fields of its cache or rules replaced."""
    names = set(problem.cache.__slots__)
    cache = {name: value for name, value in values.items() if name in names}
    rules = {name: value for name, value in values.items() if name not in names}
    return replace(problem, cache=replace(problem.cache, **cache), rules=replace(problem.rules, **rules))


@pytest.mark.parametrize("name", ["tables_RHP", "live_RHP", "page_counts_RH", "positions_NS"])
def test_int64_tables_are_refused(problem, name):
    wide = getattr(problem.cache, name).long()
    with pytest.raises(ValueError, match=f"{name}: dtype torch.int64, expected torch.int32"):
        change(problem, **{name: wide}).decode("torch")


def test_query_heads_must_divide(problem):
    bad = replace(problem, q_TQD=torch.zeros(2, 5, 64))
    with pytest.raises(ValueError, match="5 query heads do not divide among 2 kv heads"):
        bad.decode("torch")


def test_last_dim_must_be_contiguous(problem):
    flipped = problem.cache.k_pool_NSD.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="k_pool_NSD: last dim must be contiguous"):
        change(problem, k_pool_NSD=flipped).decode("torch")


def test_page_size_of_64_is_refused():
    pool = torch.zeros(2, 64, 8)
    with pytest.raises(ValueError, match="page_size 64 is not supported"):
        ops.copy_slots(torch.tensor([0]), torch.tensor([1]), pool, pool, torch.zeros(2, 64, dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8, torch.float8_e4m3fn])
def test_dtypes_that_are_not_supported(problem, dtype):
    pools = {name: getattr(problem.cache, name).to(dtype) for name in ("k_pool_NSD", "v_pool_NSD")}
    with pytest.raises(ValueError, match=r"k_pool_NSD: .*(expected float32|is not supported)"):
        change(problem, **pools).decode("torch")


def test_learned_sink_logits_are_refused_by_name(problem):
    q = torch.zeros(3, 2, 16)
    with pytest.raises(ValueError, match="learned sink logits"):
        ops.prefill_attention(q, q, q, scale=1.0, sink_logits_Q=torch.zeros(2))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("scale", 0.0, "scale 0.0: must be positive"),
        ("native_window", 0, "native_window 0"),
        ("softcap", -1.0, "softcap -1.0"),
        ("lower", torch.zeros(3, dtype=torch.int32), r"lower: shape \[3\], expected \[2\]"),
        ("lower", torch.zeros(2), "lower: dtype torch.float32"),
        ("exempt_RE2", torch.zeros(2, 4, dtype=torch.int32), "exempt_RE2: shape"),
        ("sink_end_R", torch.zeros(2, dtype=torch.int32), "sink_end_R and q_sink: give both or neither"),
    ],
)
def test_rules(problem, field, value, words):
    with pytest.raises(ValueError, match=words):
        change(problem, **{field: value}).decode("torch")


@pytest.mark.parametrize("starts", [[0, 1], [0, 2, 1], [1, 1, 2], [0, 1, 3]])
def test_row_starts(problem, starts):
    with pytest.raises(ValueError, match="row_start_R1"):
        replace(problem, row_start=starts).extend("torch")


def test_unknown_backend(problem, monkeypatch):
    with pytest.raises(ValueError, match="backend 'cuda' is unknown"):
        problem.decode("cuda")
    monkeypatch.setenv("KVGATE_BACKEND", "numpy")
    with pytest.raises(ValueError, match="backend 'numpy' is unknown"):
        problem.decode(None)


def test_environment_chooses_the_backend(monkeypatch):
    monkeypatch.delenv("KVGATE_BACKEND", raising=False)
    assert ops.choose_backend(None, torch.device("cpu")) == "native"
    assert ops.choose_backend(None, torch.device("cuda")) == "triton"
    monkeypatch.setenv("KVGATE_BACKEND", "triton")
    assert ops.choose_backend(None, torch.device("cpu")) == "triton"
    assert ops.choose_backend("torch", torch.device("cuda")) == "torch"


def test_decode_needs_a_query_for_every_row(problem):
    bad = replace(problem, q_TQD=problem.q_TQD[:1], query_position_T=problem.query_position_T[:1])
    with pytest.raises(ValueError, match="q_RQD: 1 rows, the tables have 2"):
        bad.decode("torch")


def test_append_shapes(problem):
    c = problem.cache
    k = torch.zeros(2, 2, 64)
    position = torch.zeros(2, dtype=torch.int32)
    pools = (c.k_pool_NSD, c.v_pool_NSD, c.positions_NS)
    with pytest.raises(ValueError, match=r"slots_TH: dtype torch\.int32"):
        ops.append_kv(k, k, position, torch.zeros((2, 2), dtype=torch.int32), *pools)
    with pytest.raises(ValueError, match="k_THD: shape"):
        ops.append_kv(k, k, position, torch.zeros((2, 1), dtype=torch.int64), *pools)
    with pytest.raises(ValueError, match=r"slots_TH: .* is outside"):
        ops.append_kv(k, k, position, torch.full((2, 2), -1), *pools)
