"""Probes, evidence of a chosen size, and policies that evict once with a budget of any shape, in the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from kvgate.compressors.attending import peaks, probabilities
from kvgate.compressors.budgets import Limit
from kvgate.compressors.evidence import Evidence, LastQueries, Need, QueryMoments
from kvgate.compressors.policy import Shape
from kvgate.compressors.scored import Scored
from kvgate.engine.slots import Slots

Fixture = Callable[..., Any]
CONTEXT, PROBE = 40, 17
ALL: frozenset[Need] = frozenset({"keys", "values", "probe", LastQueries(64), LastQueries(5), QueryMoments(4)})


@dataclass(frozen=True)
class Norm(Scored):
    """Keeps the largest keys."""

    name: ClassVar[str] = "norm"
    needs: ClassVar[frozenset[Need]] = frozenset({"keys"})

    def score(self, evidence: Evidence) -> Tensor:
        assert evidence.keys is not None
        return torch.where(evidence.live, evidence.keys().float().norm(dim=-1), 0.0)


def transformers_attention(model: Any, tokens: list[int]) -> Tensor:
    """fp32 ``[L, Q, T, T]`` of the untouched copy."""
    model.copy.set_attn_implementation("eager")
    with torch.no_grad():
        found = model.copy(torch.tensor([tokens]), use_cache=False, output_attentions=True)
    return torch.stack([layer[0] for layer in found.attentions])


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "qwen2_window", "phi3"])
def test_a_probe_sees_what_transformers_attends(tiny: Fixture, text: Fixture, architecture: str) -> None:
    model, tokens = tiny(architecture), text(CONTEXT + PROBE)
    engine = model.engine()
    row, _ = engine.prefill(tokens[:CONTEXT], needs=ALL)
    seen = engine.evidence(row)
    found = peaks(engine.probe(row, tokens[CONTEXT:]), seen)
    attended = transformers_attention(model, tokens)[:, :, CONTEXT:, :CONTEXT]
    layers, heads = found.shape[:2]
    want = attended.reshape(layers, heads, -1, CONTEXT).amax(2)
    got = torch.zeros_like(want)
    for layer, head, slot in seen.live.nonzero().tolist():
        got[layer, head, seen.positions[layer, head, slot]] = found[layer, head, slot]
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)
    assert row.probed == PROBE


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_the_last_queries_attend_as_in_transformers(tiny: Fixture, text: Fixture, architecture: str) -> None:
    model, tokens = tiny(architecture), text(CONTEXT)
    engine = model.engine()
    row, _ = engine.prefill(tokens, needs=ALL)
    seen = engine.evidence(row, frozenset({"keys", LastQueries(5)}))
    want = transformers_attention(model, tokens)[:, :, -5:]
    assert seen.queries is not None
    assert seen.queries.shape[2] == 5
    for layer, found in enumerate(probabilities(seen)):
        full = torch.zeros(*found.shape[:3], CONTEXT)
        for head, slot in seen.live[layer].nonzero().tolist():
            full[head, :, :, seen.positions[layer, head, slot]] = found[head, :, :, slot]
        if engine.info.native_windows[layer] is None:
            torch.testing.assert_close(full.flatten(0, 1), want[layer], rtol=1e-3, atol=1e-5)


def test_a_probe_leaves_nothing_behind(tiny: Fixture, text: Fixture) -> None:
    model, tokens = tiny("llama"), text(CONTEXT + 1)
    engine = model.engine()
    row, _ = engine.prefill(tokens[:CONTEXT], needs=ALL)
    before, other = engine.tables.pool.free, engine.fork(row)
    engine.probe(row, text(PROBE, 3))
    assert (engine.tables.pool.free, row.length) == (before, CONTEXT)
    engine.tables.check()
    assert torch.equal(*engine.extend([row, other], [tokens[CONTEXT:]] * 2))


def test_both_ways_to_run_a_probe_agree(tiny: Fixture, text: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = tiny("llama"), text(CONTEXT)
    engine = model.engine()
    row, _ = engine.prefill(tokens, needs=ALL)
    fast = engine.probe(row, text(PROBE, 3))
    monkeypatch.setattr(Slots, "even", lambda self, row: None)
    slow = engine.probe(row, text(PROBE, 3))
    torch.testing.assert_close(fast.lse, slow.lse, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(fast.queries, slow.queries, rtol=1e-3, atol=1e-4)


def test_a_probe_of_an_evicted_row_attends_what_is_left(tiny: Fixture, text: Fixture) -> None:
    """Uneven heads: the probabilities of each query, the probe's own part included, sum to one."""
    engine = tiny("llama").engine()
    row, _ = engine.prefill(text(CONTEXT), needs=ALL)
    child = engine.fork(row, Norm(20, shape="model"))
    engine.evict(child)
    child.collect = ALL
    seen = engine.evidence(child)
    observed = engine.probe(child, text(1, 4))
    assert seen.model is not None
    assert seen.keys is not None
    keys = torch.where(seen.live[..., None], seen.keys(), 0.0)
    for layer in range(2):
        logits = (observed.queries[layer].reshape(2, 3, -1) @ keys[layer].transpose(1, 2)) * seen.model.scale
        share = torch.where(seen.live[layer][:, None], (logits - observed.lse[layer].reshape(2, 3, 1)).exp(), 0.0)
        assert (share.sum(-1) <= 1 + 1e-5).all()
        assert (share.sum(-1) > 0.1).all()


def test_moments_are_those_of_the_queries_before_rotation(tiny: Fixture, text: Fixture) -> None:
    model, tokens = tiny("llama"), text(CONTEXT)
    caught: list[Tensor] = []
    hooks = [
        layer.self_attn.q_proj.register_forward_hook(lambda module, args, out: caught.append(out[0].detach()))
        for layer in model.copy.model.layers
    ]
    model.logits(tokens)
    for hook in hooks:
        hook.remove()
    for chunk in (64, 7):
        engine = model.engine(prefill_chunk=chunk)
        row, _ = engine.prefill(tokens, needs=ALL)
        moments = engine.evidence(row).moments
        assert moments is not None
        for layer, plain in enumerate(caught):
            queries = plain.view(CONTEXT, 6, 8)[4:].transpose(0, 1)
            centred = queries - queries.mean(1, keepdim=True)
            covariance = centred.transpose(1, 2) @ centred / queries.shape[1]
            torch.testing.assert_close(moments.mean[layer], queries.mean(1), rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(moments.covariance[layer], covariance, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("window", [1, 5, 64])
def test_as_many_queries_as_were_asked_for(tiny: Fixture, text: Fixture, window: int) -> None:
    engine = tiny("llama").engine(prefill_chunk=9)
    row, _ = engine.prefill(text(80), needs=frozenset({LastQueries(window)}))
    assert row.queries is not None
    assert row.queries.shape[2] == window


def test_too_small_a_window_is_refused(tiny: Fixture, text: Fixture) -> None:
    @dataclass(frozen=True)
    class Wide(Norm):
        needs: ClassVar[frozenset[Need]] = frozenset({LastQueries(64)})

    engine = tiny("llama").engine()
    row, _ = engine.prefill(text(80), needs=frozenset({LastQueries(32)}))
    with pytest.raises(ValueError, match="needs the last 64 queries, not collected during prefill"):
        engine.fork(row, Wide(20))


@pytest.mark.parametrize("shape, floor", [("head", 0.0), ("layer", 0.2), ("model", 0.0)])
def test_an_answer_stays_beside_the_budget_of_a_policy_that_evicts_once(
    tiny: Fixture, text: Fixture, live_tokens: Fixture, shape: Shape, floor: float
) -> None:
    engine = tiny("llama").engine()
    parent, _ = engine.prefill(text(CONTEXT), needs=frozenset({"keys"}))
    row = engine.fork(parent, Norm(15, shape=shape, floor=floor))
    engine.evict(row, compact=True)
    assert engine.live_tokens(row) == 15 * 4
    for count in (6, 1, 1):
        engine.extend([row], [text(count, 5)])
    assert engine.live_tokens(row) == (15 + 8) * 4
    assert {tuple(head[-8:]) for heads in live_tokens(engine, row) for head in heads} == {tuple(range(40, 48))}
    assert row.evicted == 25 * 4


@pytest.mark.parametrize("shape", ["head", "layer", "model"])
def test_a_policy_may_evict_at_every_step_whatever_its_shape(tiny: Fixture, text: Fixture, shape: Shape) -> None:
    engine = tiny("llama").engine()
    parent, _ = engine.prefill(text(CONTEXT), needs=frozenset({"keys"}))
    row = engine.fork(parent, Norm(15, shape=shape, when="step"))
    engine.evict(row)
    for _ in range(12):
        engine.extend([row], [[7]])
        assert engine.live_tokens(row) == 15 * 4
    engine.tables.check()


@pytest.mark.parametrize("shape", ["head", "model"])
def test_shared_scores_keep_what_a_policy_s_own_would(
    tiny: Fixture, text: Fixture, live_tokens: Fixture, shape: Shape
) -> None:
    engine = tiny("llama").engine()
    parent, _ = engine.prefill(text(CONTEXT), needs=frozenset({"keys"}))
    scores = engine.score(parent, Norm(3))
    for tokens in (10, 25):
        rows = [engine.fork(parent, Norm(tokens, shape=shape)) for _ in range(2)]
        engine.evict(rows[0])
        engine.evict(rows[1], scores=scores)
        assert live_tokens(engine, rows[0]) == live_tokens(engine, rows[1])


@pytest.mark.parametrize("when", ["once", "step"])
def test_a_budget_that_covers_the_prompt_gives_the_exact_run(tiny: Fixture, text: Fixture, when: Any) -> None:
    engine = tiny("llama").engine()
    parent, _ = engine.prefill(text(CONTEXT), needs=frozenset({"keys"}))
    policy = Norm(CONTEXT if when == "once" else CONTEXT + 3, shape="model", when=when)
    exact, row = engine.fork(parent), engine.fork(parent, policy)
    engine.evict(row, compact=True)
    for _ in range(3):
        assert torch.equal(*engine.extend([exact, row], [[9]] * 2))
    assert Limit.of(policy).covers(CONTEXT, CONTEXT + 3)
    assert not row.tainted
    assert row.evicted == 0
