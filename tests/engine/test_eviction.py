"""Eviction against an oracle that evicts nothing and masks instead, in float64 (see conftest)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvgate.compressors.evidence import Evidence, Keep, Span
from kvgate.compressors.h2o import H2O
from kvgate.compressors.policy import Policy, covered
from kvgate.compressors.sliding_window import SlidingWindow
from kvgate.compressors.streaming_llm import StreamingLLM

Fixture = Callable[..., Any]
CONTEXT, LENGTH = 30, 52
POLICIES: dict[str, Policy] = {
    "window": SlidingWindow(9),
    "window_1": SlidingWindow(1),
    "streaming": StreamingLLM(window=7, sinks=4),
    "no_sinks": StreamingLLM(window=7, sinks=0),
    "h2o": H2O(heavy=6, recent=5),
    "h2o_heavy_only": H2O(heavy=8, recent=0),
    "h2o_recent_only": H2O(heavy=0, recent=8),
    "h2o_1": H2O.for_budget(1),
    "rebased": StreamingLLM(window=7, sinks=4, positions="rebased"),
}
FEEDS = {"one by one": [1] * 22, "together": [22], "mixed": [9, 1, 1, 5, 1, 5]}


def rule_of(rule: Fixture, policy: Policy, protected: tuple[Span, ...]) -> Any:
    spans = policy.forced_spans(protected)
    return rule(
        budget=policy.budget,
        forced=frozenset(token for span in spans for token in range(span.start, span.end)),
        heavy=policy.heavy if isinstance(policy, H2O) else None,
        rebased=isinstance(policy, StreamingLLM) and policy.positions == "rebased",
    )


def assert_same_tokens(got: list[list[int]], layer: Any, length: int) -> None:
    """Where the model drops the sinks itself, a row under its budget may hold tokens that nothing attends any more."""
    for head, want in zip(got, layer.live, strict=True):
        assert len(set(head)) == len(head), "a position stands twice in a head"
        if layer.window is None:
            assert head == sorted(want)
        else:
            assert want <= set(head) <= set(range(length - layer.window + 1, length))


def run_beside_the_oracle(
    model: Any, oracle: Any, the_rule: Any, policy: Policy, tokens: list[int], feed: list[int],
    live_tokens: Fixture, protected: tuple[Span, ...] = (), *, page_size: int = 8, compact: bool = False,
) -> None:  # fmt: skip
    """Context exact, then evicted, then the rest as ``feed`` says; logits and live tokens must agree all along."""
    engine = model.engine(page_size=page_size)
    parent, _ = engine.prefill(tokens[:CONTEXT], needs=policy.needs, protected=protected)
    row = engine.fork(parent, policy)
    engine.release(parent)
    engine.evict(row, compact=compact)
    oracle.feed(tokens[:CONTEXT])
    oracle.rule = the_rule
    oracle.evict()
    at = CONTEXT
    for count in feed:
        got = engine.extend([row], [tokens[at : at + count]], every=True)
        want = oracle.feed(tokens[at : at + count])
        torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-4)
        at += count
        live = live_tokens(engine, row)
        for layer, heads in enumerate(live):
            assert_same_tokens(heads, oracle.layers[layer], at)
        assert max(len(head) for heads in live for head in heads) <= policy.budget
        engine.tables.check()
    assert row.tainted
    assert row.evicted > 0
    assert row.length == at
    engine.release(row)
    assert engine.tables.pool.free == engine.tables.pool.total


@pytest.mark.parametrize("feed", FEEDS.values(), ids=FEEDS)
@pytest.mark.parametrize("name", POLICIES)
def test_llama_keeps_and_attends_what_the_oracle_does(
    tiny: Fixture, oracle: Fixture, rule: Fixture, text: Fixture, live_tokens: Fixture, name: str, feed: list[int]
) -> None:
    model, policy = tiny("llama"), POLICIES[name]
    run_beside_the_oracle(
        model, oracle(model), rule_of(rule, policy, ()), policy, text(LENGTH), feed, live_tokens, compact=name < "s"
    )


@pytest.mark.parametrize("architecture", ["gemma2", "mistral", "phi3", "qwen2_window"])
@pytest.mark.parametrize(
    "policy", [SlidingWindow(9), StreamingLLM(window=6, sinks=3), H2O(4, 4)], ids=lambda policy: policy.name
)
def test_models_with_windows_of_their_own(
    tiny: Fixture, oracle: Fixture, rule: Fixture, text: Fixture, live_tokens: Fixture,
    architecture: str, policy: Policy,
) -> None:  # fmt: skip
    model = tiny(architecture)
    tokens, feed = text(LENGTH, 5), FEEDS["mixed"]
    run_beside_the_oracle(model, oracle(model), rule_of(rule, policy, ()), policy, tokens, feed, live_tokens)


@pytest.mark.parametrize("architecture", ["llama", "phi", "qwen3", "gemma"])
def test_rebased_positions_are_those_inside_the_cache(
    tiny: Fixture, oracle: Fixture, rule: Fixture, text: Fixture, live_tokens: Fixture, architecture: str
) -> None:
    """Two layers, keys cached before rotation as the paper does it, against turning the query back."""
    model, policy = tiny(architecture), POLICIES["rebased"]
    tokens, feed = text(LENGTH, 6), FEEDS["mixed"]
    run_beside_the_oracle(model, oracle(model), rule_of(rule, policy, ()), policy, tokens, feed, live_tokens)


PROTECTED: dict[str, tuple[Span, ...]] = {
    "beginning": (Span(0, 6),),
    "middle": (Span(11, 14), Span(20, 21)),
    "across the window": (Span(25, 33),),
    "overlapping the sinks": (Span(2, 7), Span(5, 9)),
}


@pytest.mark.parametrize("feed", ["one by one", "mixed"])
@pytest.mark.parametrize("where", PROTECTED)
@pytest.mark.parametrize(
    "policy", [SlidingWindow(14), StreamingLLM(window=11, sinks=4), H2O(7, 7)], ids=lambda policy: policy.name
)
def test_protected_spans_stay_and_count(
    tiny: Fixture, oracle: Fixture, rule: Fixture, text: Fixture, live_tokens: Fixture,
    policy: Policy, where: str, feed: str,
) -> None:  # fmt: skip
    model, protected = tiny("llama"), PROTECTED[where]
    run_beside_the_oracle(
        model, oracle(model), rule_of(rule, policy, protected), policy, text(LENGTH, 8), FEEDS[feed], live_tokens,
        protected,
    )  # fmt: skip


@pytest.mark.parametrize("page_size", [8, 16, 32])
def test_page_size_changes_nothing(
    tiny: Fixture, oracle: Fixture, rule: Fixture, text: Fixture, live_tokens: Fixture, page_size: int
) -> None:
    model, policy = tiny("llama"), H2O(6, 5)
    run_beside_the_oracle(
        model, oracle(model), rule_of(rule, policy, ()), policy, text(LENGTH, 9), FEEDS["mixed"], live_tokens,
        page_size=page_size, compact=True,
    )  # fmt: skip


@pytest.mark.parametrize("protected", [(), (Span(0, 6),), (Span(4, 5),)], ids=str)
@pytest.mark.parametrize("count", [1, 5])
def test_rebased_equals_a_fresh_run_over_the_kept_tokens(
    tiny: Fixture, text: Fixture, live_tokens: Fixture, protected: tuple[Span, ...], count: int
) -> None:
    """On one layer K and V do not depend on what came before: transformers on [kept..., new] must agree."""
    model, tokens = tiny("llama_one_layer"), text(LENGTH, 3)
    policy = StreamingLLM(window=8, sinks=4, positions="rebased")
    engine = model.engine()
    parent, _ = engine.prefill(tokens[:CONTEXT], protected=protected)
    row = engine.fork(parent, policy)
    engine.evict(row)
    for at in range(CONTEXT, LENGTH - count, count):
        got = engine.extend([row], [tokens[at : at + count]])[0]
        live = live_tokens(engine, row)
        assert live[0][0] == live[0][1]
        assert len(live[0][0]) == policy.budget
        want = model.logits([tokens[token] for token in live[0][0]])[-1]
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


def test_original_positions_are_not_those_of_a_fresh_run(tiny: Fixture, text: Fixture, live_tokens: Fixture) -> None:
    """The two modes differ, so the test above can tell them apart; the kept tokens are the same."""
    model, tokens = tiny("llama_one_layer"), text(CONTEXT + 1, 3)
    engine = model.engine()
    parent, _ = engine.prefill(tokens[:CONTEXT])
    rows = [engine.fork(parent, StreamingLLM(8, 4, mode)) for mode in ("original", "rebased")]
    original, rebased = engine.extend(rows, [tokens[CONTEXT:]] * 2)
    assert live_tokens(engine, rows[0]) == live_tokens(engine, rows[1])
    assert (original - rebased).abs().max() > 1e-2


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "phi3"])
@pytest.mark.parametrize("slack", [0, 1, 100])
def test_a_budget_of_at_least_the_length_gives_the_exact_run(
    tiny: Fixture, text: Fixture, architecture: str, slack: int
) -> None:
    """Bit for bit: such a row takes the same path."""
    model, tokens = tiny(architecture), text(45, 4)
    budget = 45 + slack
    policies: list[Policy] = [
        SlidingWindow(budget), StreamingLLM.for_budget(budget), H2O.for_budget(budget),
        StreamingLLM.for_budget(budget, positions="rebased"),
    ]  # fmt: skip
    engine = model.engine()
    parent, _ = engine.prefill(tokens[:30], needs=frozenset({"mass"}))
    exact = engine.fork(parent)
    rows = [engine.fork(parent, policy) for policy in policies]
    for row in rows:
        engine.evict(row, compact=True)
    for at, count in ((30, 6), (36, 1), (37, 1), (38, 7)):
        logits = engine.extend([exact, *rows], [tokens[at : at + count]] * (1 + len(rows)))
        for index, policy in enumerate(policies, 1):
            torch.testing.assert_close(logits[index], logits[0], rtol=0, atol=2e-5, msg=str(policy))
            assert logits[index].argmax() == logits[0].argmax()
    assert not any(row.tainted or row.evicted for row in rows)


def test_streaming_llm_without_sinks_is_the_sliding_window(tiny: Fixture, text: Fixture, live_tokens: Fixture) -> None:
    engine = tiny("llama").engine()
    tokens = text(LENGTH, 2)
    parent, _ = engine.prefill(tokens[:CONTEXT])
    rows = [
        engine.fork(parent, policy) for policy in (SlidingWindow(9), StreamingLLM(9, 0), StreamingLLM(9, 0, "rebased"))
    ]
    for at in range(CONTEXT, LENGTH, 2):
        logits = engine.extend(rows, [tokens[at : at + 2]] * 3)
        assert torch.equal(logits[0], logits[1])
        assert torch.equal(logits[0], logits[2])
        assert live_tokens(engine, rows[0]) == live_tokens(engine, rows[1])


def test_covered_is_what_the_oracle_counts(rule: Fixture) -> None:
    for protected in PROTECTED.values():
        policy = StreamingLLM(11, 4)
        assert len(rule_of(rule, policy, protected).forced) == covered(policy.forced_spans(protected))


class Boastful(SlidingWindow):
    """Gives its budget as small until it has been asked a few times, then as everything, and keeps everything."""

    name = "boastful"
    asked = 0
    honest = 4

    @property
    def budget(self) -> int:
        type(self).asked += 1
        return self.window if type(self).asked <= type(self).honest else 10_000

    def decide(self, evidence: Evidence) -> Keep:
        return Keep.all(evidence)

    def bounds(self, protected: Any) -> None:
        return None


@pytest.mark.parametrize("honest", [1, 2, 3, 5, 20])
def test_a_budget_is_what_it_was_when_the_row_came_under_the_policy(
    tiny: Fixture, text: Fixture, monkeypatch: pytest.MonkeyPatch, honest: int
) -> None:
    """However often a policy tells the truth first, it cannot keep more than was promised for it."""
    monkeypatch.setattr(Boastful, "asked", 0)
    monkeypatch.setattr(Boastful, "honest", honest)
    engine = tiny("llama").engine()
    row, _ = engine.prefill(text(40))
    with pytest.raises(ValueError, match=r"keeps 40 tokens of a head, its budget is 10|gives itself a budget of 10000"):
        engine.evict(engine.fork(row, Boastful(10), budget=10))
    fork = engine.fork(row, SlidingWindow(10), budget=10)
    with pytest.raises(ValueError, match="gives itself a budget of 11, was asked for 10"):
        engine.fork(row, SlidingWindow(11), budget=10)
    engine.evict(fork)
    assert int(engine.tables.live_counts(fork.id).max()) == 10


def test_a_policy_that_claims_to_be_done_is_asked_again(tiny: Fixture, text: Fixture) -> None:
    """``decides`` and ``budget_shape`` are read once too."""

    class Shifty(SlidingWindow):
        name = "shifty"
        after = False

        @property
        def decides(self) -> Any:
            return "once" if type(self).after else "step"

        @property
        def budget_shape(self) -> Any:
            return "model" if type(self).after else "head"

    engine = tiny("llama").engine()
    row, _ = engine.prefill(text(40))
    fork = engine.fork(row, Shifty(10))
    Shifty.after = True
    engine.evict(fork)
    for token in text(12, 3):
        engine.extend([fork], [[token]])
        assert int(engine.tables.live_counts(fork.id).max()) == 10
