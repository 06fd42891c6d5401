"""Selection by score under every budget shape, against plain Python."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvgate.compressors.catalog import parameters
from kvgate.compressors.contract import PolicyViolation, check_keep
from kvgate.compressors.evidence import Evidence, Keep, Span, in_spans
from kvgate.compressors.policy import Shape
from kvgate.compressors.scored import Scored

LAYERS, HEADS, SLOTS = 2, 3, 12


@dataclass(frozen=True)
class ByMass(Scored):
    """Scores handed over as attention mass."""

    name: ClassVar[str] = "by_mass"
    newest: int = 0

    def score(self, evidence: Evidence) -> Tensor:
        assert evidence.mass is not None
        return evidence.mass

    def recent(self) -> int:
        return self.newest


def made(seed: int, protected: tuple[Span, ...] = ()) -> Evidence:
    """All positions live but two slots a head, in an order of their own; many scores tie."""
    draw = torch.Generator().manual_seed(seed)
    shape = (LAYERS, HEADS, SLOTS)
    positions = torch.stack([torch.randperm(SLOTS, generator=draw) for _ in range(LAYERS * HEADS)])
    live = torch.ones(shape, dtype=torch.bool)
    live[..., 3] = live[..., 7] = False
    mass = torch.randint(0, 4, shape, generator=draw).float()
    mass[~live] = torch.inf
    return Evidence(positions.reshape(shape).int(), live, SLOTS, protected, mass=mass)


def expected(policy: ByMass, seen: Evidence) -> set[tuple[int, int, int]]:
    """(layer, head, position) of what stays."""
    assert seen.mass is not None
    slots = {
        (layer, head, int(seen.positions[layer, head, slot])): float(seen.mass[layer, head, slot])
        for layer, head, slot in seen.live.nonzero().tolist()
    }
    spans = policy.forced_spans(seen.protected)
    kept = {at for at in slots if any(span.start <= at[2] < span.end for span in spans)}
    order = sorted(slots, key=lambda at: (-slots[at], at[2], at[0], at[1]))
    for layer in range(LAYERS):
        for head in range(HEADS):
            mine = {at for at in kept if at[:2] == (layer, head)}
            new = sorted((at for at in slots if at[:2] == (layer, head) and at not in mine), key=lambda at: -at[2])
            new = [at for at in new if at[2] >= SLOTS - policy.newest][: policy.tokens - len(mine)]
            kept |= set(new)
            if policy.shape != "head":
                held = len(mine) + len(new)
                rest = [at for at in order if at[:2] == (layer, head) and at not in kept]
                kept |= set(rest[: max(0, int(policy.floor * policy.tokens) - held)])
    groups = {
        "head": [{(layer, head)} for layer in range(LAYERS) for head in range(HEADS)],
        "layer": [{(layer, head) for head in range(HEADS)} for layer in range(LAYERS)],
        "model": [{(layer, head) for layer in range(LAYERS) for head in range(HEADS)}],
    }[policy.shape]
    for group in groups:
        held = sum(at[:2] in group for at in kept)
        rest = [at for at in order if at[:2] in group and at not in kept]
        kept |= set(rest[: policy.tokens * len(group) - held])
    return kept


@given(
    seed=st.integers(0, 50),
    tokens=st.integers(3, 11),
    shape=st.sampled_from(["head", "layer", "model"]),
    floor=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    newest=st.integers(0, 3),
    protected=st.sampled_from([(), (Span(0, 2),), (Span(4, 5),)]),
)
@settings(max_examples=150, deadline=None)
def test_the_highest_scores_stay_among_those_that_share_a_budget(
    seed: int, tokens: int, shape: Shape, floor: float, newest: int, protected: tuple[Span, ...]
) -> None:
    policy = ByMass(tokens, shape=shape, floor=floor, newest=newest)
    seen = made(seed, protected)
    keep = policy.decide(seen)
    check_keep(policy, seen, keep)
    got = {(layer, head, int(seen.positions[layer, head, s])) for layer, head, s in keep.slots.nonzero().tolist()}
    assert got == expected(policy, seen)
    assert not (seen.live & ~keep.slots & in_spans(seen.positions, protected)).any()


@pytest.mark.parametrize(
    "shape, whom, budget", [("head", "a head", 4), ("layer", "a layer's heads", 12), ("model", "all heads", 24)]
)
def test_one_slot_more_than_the_budget_is_a_violation(shape: Shape, whom: str, budget: int) -> None:
    policy, seen = ByMass(4, shape=shape), made(1)
    slots = policy.decide(seen).slots.clone()
    check_keep(policy, seen, Keep(slots))
    layer, head, slot = (seen.live & ~slots).nonzero()[0].tolist()
    slots[layer, head, slot] = True
    with pytest.raises(PolicyViolation, match=rf"keeps {budget + 1} tokens of {whom}, its budget is {budget}"):
        check_keep(policy, seen, Keep(slots))


def test_a_model_s_budget_is_of_what_the_exact_run_holds() -> None:
    """Half of 12 tokens is 6 a head; where windows leave the exact run 48 of 72 slots, a half is 24 of them."""
    policy, seen = ByMass(6, shape="model"), made(2)
    assert policy.decide(seen).slots.sum() == 6 * LAYERS * HEADS
    assert policy.decide(replace(seen, exact_slots=48)).slots.sum() == 24


def test_for_budget_takes_every_field_with_a_default() -> None:
    assert set(parameters(ByMass)) == {"shape", "floor", "when", "newest"}
    policy = ByMass.for_budget(7, shape="layer", floor=0.2, when="step", newest=2)
    assert (policy.budget, policy.budget_shape, policy.decides, policy.newest) == (7, "layer", "step", 2)
    assert "tokens" not in policy.describe()


@pytest.mark.parametrize(
    "params, says",
    [
        ({"shape": "row"}, "shape 'row': choose one of head, layer, model"),
        ({"when": "never"}, "when 'never': choose one of step, once"),
        ({"floor": 1.5}, "floor 1.5: a share of the budget"),
    ],
)
def test_bad_parameters_are_named(params: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ByMass.for_budget(4, **params)


def test_budgets_and_shapes_share_a_scoring_and_parameters_do_not() -> None:
    assert ByMass(4).scoring() == ByMass(9, shape="model", floor=0.2, when="step").scoring()
    assert ByMass(4).scoring() != ByMass(4, newest=1).scoring()
