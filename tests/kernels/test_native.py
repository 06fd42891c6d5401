"""The compiled extend and prefill: what their bits depend on, every build of them, and the masses a policy ranks by."""

import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest
import torch

from kvgate.kernels import native, native_build, ops, reference
from kvgate.kernels.problems import Shape, make
from kvgate.kernels.types import Rules

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler here")
DTYPES = [torch.float32, torch.bfloat16]
RULES = {"lower": True, "spans": 1, "sinks": True, "native_window": 500}


def same(a, b):
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("out", "lse", "mass"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rules", [{}, RULES])
def test_a_token_does_not_depend_on_the_tokens_fed_with_it(dtype, rules):
    """The same bits in one call, in chunks and one by one, also before the later tokens are in their slots."""
    problem = make(Shape(((600, 40), (90, 7)), 2, 3, 48, 16, dtype, keep=0.6, **rules), 3)
    whole, cache = problem.extend("native"), problem.cache
    for row, chunk in ((0, 1), (0, 13), (1, 3)):
        start, stop = problem.row_start[row], problem.row_start[row + 1]
        for first in range(start, stop, chunk):
            tokens = list(range(first, min(stop, first + chunk)))
            latest = int(problem.query_position_T[tokens[-1]])
            alone = problem.rows([row])
            live = alone.cache.live_RHP.clone()
            for head in range(2):
                for page in range(int(alone.cache.page_counts_RH[0, head])):
                    for slot in range(16):
                        if int(live[0, head, page]) >> slot & 1:
                            where = cache.positions_NS[int(alone.cache.tables_RHP[0, head, page]), slot]
                            live[0, head, page] &= ~((1 << slot) * int(int(where) > latest))
            own = [token - start for token in tokens]
            rules_of = replace(
                alone.rules,
                lower=None if alone.rules.lower is None else alone.rules.lower[own],
                q_sink=None if alone.rules.q_sink is None else alone.rules.q_sink[own],
            )
            part = replace(
                alone,
                q_TQD=alone.q_TQD[own],
                query_position_T=alone.query_position_T[own],
                row_start=[0, len(own)],
                rules=rules_of,
                cache=replace(alone.cache, live_RHP=live),
            ).extend("native")
            assert torch.equal(part.out, whole.out[tokens])
            assert torch.equal(part.lse, whole.lse[tokens])


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_no_bits(dtype):
    problem = make(Shape(((700, 40), (90, 7), (33, 1)), 2, 3, 64, 16, dtype, sinks=True), 4)
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn((300, heads, 64), generator=random).to(dtype) for heads in (6, 2, 2))
    extended, prefilled = [], []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        extended.append(problem.extend("native"))
        prefilled.append(ops.prefill_attention(q, k, v, scale=0.125, want_mass=True, backend="native"))
    assert all(same(extended[0], other) for other in extended[1:])
    assert all(same(prefilled[0], other) for other in prefilled[1:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_mass_for_a_prefill_is_plain_sdpa(dtype, monkeypatch):
    monkeypatch.setattr(native, "prefill", lambda *_: pytest.fail("compiled kernel used"))
    q, k, v = (torch.randn((70, heads, 64)).to(dtype) for heads in (6, 2, 2))
    assert ops.prefill_attention(q, k, v, scale=0.125, backend="native").mass is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_masses_keep_the_tokens_that_exact_masses_keep(dtype):
    """Masses within 2e-6 of their size of the float64 reference on these inputs, so the same heavy hitters."""
    random = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn((700, heads, 64), generator=random) for heads in (9, 3, 3))
    k = k * (1 + 2 * torch.rand((700, 1, 1), generator=random))  # some keys draw far more attention than others
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    got = ops.prefill_attention(q, k, v, scale=0.125, want_mass=True, backend="native").mass.double()
    want = reference.prefill(q, k, v, Rules(0.125), True).mass
    assert float(((got - want).abs() / want).max()) < 2e-6
    for budget in (35, 70, 175, 350):
        chosen, exact = (mass.topk(budget, 1).indices.sort(1).values for mass in (got, want))
        assert torch.equal(chosen, exact)


SCRIPT = textwrap.dedent(
    """
    import sys
    import torch
    from kvgate.kernels import native_build, problems
    target = sys.argv[1:]
    built = native_build.build(tuple(target)) if target else native_build.library()
    native_build.library.cache_clear()
    from kvgate.kernels import native
    native.library = lambda: built
    native.amx = lambda: False
    rules = {"lower": True, "spans": 2, "sinks": True, "native_window": 43, "softcap": 5.0}
    for dtype, close in ((torch.float32, 3e-5), (torch.bfloat16, 3e-2)):
        for extra in ({}, rules):
            problem = problems.make(problems.Shape(((50, 9), (531, 31), (70, 1)), dtype=dtype, **extra), 1)
            got, want = problem.extend("native"), problem.exact()
            torch.testing.assert_close(got.out.double(), want.out, rtol=1e-2, atol=close)
            torch.testing.assert_close(got.lse.double(), want.lse, rtol=1e-5, atol=3e-5)
            torch.testing.assert_close(got.mass.double(), want.mass, rtol=1e-4, atol=3e-5)
    print("agrees")
    """
)


@pytest.mark.slow
@pytest.mark.parametrize("target", [[], ["-march=haswell"], ["-march=skylake-avx512", "-mprefer-vector-width=512"]])
def test_builds_without_amx_and_without_avx512(target):
    if target and "avx2" not in native_build._processor():
        pytest.skip("another processor family")
    done = subprocess.run([sys.executable, "-c", SCRIPT, *target], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "agrees" in done.stdout
