"""Every policy against what docs/ARCHITECTURE.md promises, for any scores, spans and number of rounds."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvgate.compressors.catalog import catalog
from kvgate.compressors.evidence import Evidence, Keep, Span
from kvgate.compressors.full import Full
from kvgate.compressors.h2o import H2O
from kvgate.compressors.policy import BudgetTooSmall, Policy, covered
from kvgate.compressors.scored import Scored
from kvgate.compressors.sliding_window import SlidingWindow
from kvgate.compressors.streaming_llm import StreamingLLM

Build = Callable[..., Evidence]
Kept = Callable[[Evidence, Tensor], list[set[int]]]

SCORES = st.sampled_from([0.0, 1.0, 1.0, 2.0, -1.0, math.inf, -math.inf, math.nan, 3.4e38, 1e-45])
SPANS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 5)).map(lambda at: Span(at[0], at[0] + at[1])), max_size=3
).map(tuple)
POLICIES = st.one_of(
    st.builds(SlidingWindow, window=st.integers(1, 24)),
    st.builds(StreamingLLM, window=st.integers(1, 20), sinks=st.integers(0, 5)),
    st.tuples(st.integers(0, 12), st.integers(0, 12))
    .filter(lambda parts: sum(parts) > 0)
    .map(lambda parts: H2O(heavy=parts[0], recent=parts[1])),
)


def forced_live(policy: Policy, held: set[int], protected: tuple[Span, ...]) -> set[int]:
    spans = list(protected)
    if isinstance(policy, StreamingLLM) and policy.sinks:
        spans.append(Span(0, policy.sinks))
    return {token for token in held if any(span.start <= token < span.end for span in spans)}


def expected_h2o(policy: H2O, held: dict[int, float], length: int, protected: set[int]) -> set[int]:
    """Section 4 in plain Python: forced, then recent (newest first), then the heaviest, lower position first."""
    room = policy.heavy + policy.recent - len(protected)
    recent = sorted((t for t in held if t not in protected and t >= length - policy.recent), reverse=True)[:room]
    others = [t for t in held if t not in protected and t not in recent]
    heaviest = sorted(others, key=lambda t: (not math.isnan(held[t]), -held[t] if held[t] == held[t] else 0.0, t))
    return protected | set(recent) | set(heaviest[: room - len(recent)])


@given(data=st.data(), policy=POLICIES, protected=SPANS, length=st.integers(1, 32), seed=st.integers(0, 9))
@settings(max_examples=250, deadline=None)
def test_budget_protected_and_the_policy_s_own_rule_hold(
    evidence: Build,
    kept: Kept,
    data: st.DataObject,
    policy: Policy,
    protected: tuple[Span, ...],
    length: int,
    seed: int,
) -> None:
    needed = covered(policy.forced_spans(protected)) + 1
    if policy.budget < needed:
        with pytest.raises(BudgetTooSmall, match=f"budget {policy.budget} is too small .* use at least {needed}"):
            policy.check(protected)
        return
    policy.check(protected)
    heads = [
        sorted(data.draw(st.sets(st.integers(0, length - 1), min_size=1), label=f"head {head}")) for head in range(2)
    ]
    mass = [data.draw(st.lists(SCORES, min_size=len(held), max_size=len(held))) for held in heads]
    seen = evidence(heads, length, mass=mass, protected=protected, seed=seed)
    before = copy.deepcopy((seen.positions, seen.live, seen.mass))

    answer = policy.decide(seen)

    assert torch.equal(answer.slots, policy.decide(seen).slots), "the same evidence must give the same answer"
    for now, then in zip((seen.positions, seen.live, seen.mass), before, strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)
    assert not (answer.slots & ~seen.live).any(), "a dead slot came back"
    for head, now in enumerate(kept(seen, answer.slots)):
        held = set(heads[head])
        forced = forced_live(policy, held, protected)
        assert forced <= now
        assert len(now) <= policy.budget
        if isinstance(policy, H2O):
            assert len(now) == min(len(held), policy.budget), "not under the budget without need"
            assert now == expected_h2o(policy, dict(zip(heads[head], mass[head], strict=True)), length, forced)
        else:
            newest = sorted(held - forced, reverse=True)[: policy.budget - needed + 1]  # what Bounds lets a query see
            assert now == forced | set(newest)


@pytest.mark.parametrize("scores", [0.0, math.inf, -math.inf, math.nan, 3.4028234663852886e38])
def test_protected_tokens_survive_scores_that_tie_with_anything(evidence: Build, kept: Kept, scores: float) -> None:
    """kvpress-style sentinels lose protected tokens here: all scores equal, the extremes included."""
    protected = (Span(3, 5), Span(20, 21))
    seen = evidence([list(range(40))] * 2, 40, mass=[[scores] * 40] * 2, protected=protected)
    for now in kept(seen, H2O(heavy=5, recent=3).decide(seen).slots):
        assert now == {3, 4, 20, 37, 38, 39, 0, 1}  # then the heaviest, all equal, so the lowest positions


@pytest.mark.parametrize("policy", [SlidingWindow(window=9), StreamingLLM(window=5, sinks=4), H2O(heavy=5, recent=4)])
def test_sinks_and_protected_survive_many_rounds_of_decoding(evidence: Build, kept: Kept, policy: Policy) -> None:
    """Elsewhere 4 sinks became 2 and then none, since slots were scored by index after top-k had shuffled them."""
    protected = (Span(2, 5),)
    held = set(range(20))
    for length in range(20, 120):
        held.add(length - 1)
        mass = [float((token * 7919) % 13) for token in sorted(held)]
        seen = evidence([sorted(held)], length, mass=[mass], protected=protected, seed=length)
        (held,) = kept(seen, policy.decide(seen).slots)
        assert len(held) == policy.budget
        assert {2, 3, 4} <= held
        assert not isinstance(policy, StreamingLLM) or {0, 1, 2, 3} <= held
        assert length - 1 in held


def test_streaming_llm_at_half_of_1494_keeps_four_sinks_and_the_last_743(evidence: Build, kept: Kept) -> None:
    seen = evidence([list(range(1494))] * 3, 1494)
    for now in kept(seen, StreamingLLM.for_budget(747).decide(seen).slots):
        assert now == {*range(4), *range(751, 1494)}


@pytest.mark.parametrize("name", sorted(set(catalog()) - {"full"}))
def test_any_budget_works_or_is_refused_by_name(evidence: Build, kept: Kept, name: str) -> None:
    policy_type: Any = catalog()[name]
    for budget in range(-1, 12):
        if budget < policy_type.smallest_budget():
            with pytest.raises(ValueError, match=f"policy {name}"):
                policy_type.for_budget(budget)
            continue
        policy = policy_type.for_budget(budget)
        assert policy.budget == budget
        policy.check(())
        seen = evidence([list(range(30))], 30, mass=[[1.0] * 30])
        if isinstance(policy, Scored):
            (now,) = kept(seen, policy.select(seen, torch.rand(seen.live.shape)))
            assert len(now) == getattr(policy, "least", budget)
            continue
        (now,) = kept(seen, policy.decide(seen).slots)
        assert len(now) == budget
        assert 29 in now, "the newest token must stay"


def test_full_keeps_everything_and_takes_no_budget(evidence: Build) -> None:
    seen = evidence([list(range(30))], 30)
    assert torch.equal(Full().decide(seen).slots, seen.live)
    with pytest.raises(ValueError, match="policy full: takes no budget"):
        Full.for_budget(5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: SlidingWindow(window=0),
        lambda: StreamingLLM(window=0),
        lambda: StreamingLLM(window=3, sinks=-1),
        lambda: StreamingLLM(window=3, positions="paper"),  # type: ignore[arg-type]
        lambda: StreamingLLM.for_budget(4),
        lambda: H2O(heavy=-1, recent=3),
        lambda: H2O(heavy=0, recent=0),
        lambda: H2O.for_budget(4, recent=5),
    ],
)
def test_senseless_parameters_are_refused_in_one_line_that_names_the_policy(make: Callable[[], Policy]) -> None:
    with pytest.raises(ValueError, match=r"^policy \w+: ") as caught:
        make()
    assert "\n" not in str(caught.value)


def test_h2o_halves_its_budget_as_the_paper_does() -> None:
    assert H2O.for_budget(10) == H2O(heavy=5, recent=5)
    assert H2O.for_budget(7) == H2O(heavy=3, recent=4)
    assert H2O.for_budget(7, recent=0) == H2O(heavy=7, recent=0)


def test_policies_remember_nothing_of_their_own(evidence: Build) -> None:
    """One object serves every sequence: it is frozen, hashable, and decides the same after deciding something else."""
    for policy in (SlidingWindow(4), StreamingLLM(window=4), H2O(heavy=2, recent=2), Full()):
        first = evidence([list(range(20))], 20, mass=[[float(token % 5) for token in range(20)]])
        other = evidence([list(range(30))], 30, mass=[[float(token % 3) for token in range(30)]], seed=3)
        answer = policy.decide(first).slots
        before = dict(vars(policy))
        policy.decide(other)
        assert torch.equal(policy.decide(first).slots, answer)
        assert vars(policy) == before
        hash(policy)
        with pytest.raises(AttributeError):
            policy.name = "other"  # type: ignore[misc]


def test_rebased_wants_protected_spans_to_continue_the_sinks() -> None:
    policy = StreamingLLM(window=20, sinks=4, positions="rebased")
    policy.check((Span(2, 9), Span(9, 12)))
    assert policy.bounds((Span(2, 9), Span(9, 12))).rebased_sinks == 12
    with pytest.raises(ValueError, match=r"protected span \[5, 9\) does not continue the sinks"):
        policy.check((Span(5, 9),))
    StreamingLLM(window=20, sinks=4).check((Span(5, 9),))


def test_keep_all_is_the_live_set(evidence: Build) -> None:
    seen = evidence([[0, 5, 9], [1]], 10)
    assert torch.equal(Keep.all(seen).slots, seen.live)


@pytest.mark.parametrize("start, end", [(-1, 3), (3, 3), (4, 2)])
def test_a_span_that_is_none_is_refused(start: int, end: int) -> None:
    with pytest.raises(ValueError, match="span"):
        Span(start, end)


@given(SPANS)
@settings(max_examples=100, deadline=None)
def test_covered_counts_a_token_once(spans: tuple[Span, ...]) -> None:
    assert covered(spans) == len({token for span in spans for token in range(span.start, span.end)})
