"""Each policy's score against its formula, token by token, in float64; slots in any order, dead ones full of NaN."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kvgate.compressors.evidence import Evidence, Model, Moments
from kvgate.compressors.expected_attention import ExpectedAttention
from kvgate.compressors.h2o import H2O
from kvgate.compressors.h2o_normalised import H2ONormalised
from kvgate.compressors.keydiff import KeyDiff
from kvgate.compressors.knorm import Knorm
from kvgate.compressors.pyramid_kv import PyramidKV
from kvgate.compressors.r_kv import RKV
from kvgate.compressors.random_choice import RandomChoice
from kvgate.compressors.scored import Scored
from kvgate.compressors.snapkv import SnapKV
from kvgate.compressors.tova import TOVA

LAYERS, HEADS, GROUP, DIM, LENGTH, SCALE = 2, 2, 3, 4, 30, 0.4


def turn(x: Tensor, by: Tensor, layer: int) -> Tensor:
    """One frequency a layer: both pairs of halves turn alike."""
    angle = by.to(x.dtype)[:, None] * 0.1 * (layer + 1)
    first, second = x.chunk(2, -1)
    return torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1)


class Case:
    """Evidence of 30 tokens, 5 of them gone, and the same in position order and float64."""

    def __init__(self, window: int = 8) -> None:
        draw = torch.Generator().manual_seed(3)
        shape = (LAYERS, HEADS, LENGTH)
        self.keys = torch.randn(*shape, DIM, generator=draw)
        self.values = torch.randn(*shape, DIM, generator=draw)
        self.queries = torch.randn(LAYERS, HEADS * GROUP, window, DIM, generator=draw)
        self.mass = torch.rand(shape, generator=draw)
        self.there = torch.ones(shape, dtype=torch.bool)
        for layer in range(LAYERS):
            for head in range(HEADS):
                self.there[layer, head, torch.randperm(LENGTH - 10, generator=draw)[:5]] = False
        order = torch.stack([torch.randperm(LENGTH, generator=draw) for _ in range(LAYERS * HEADS)]).view(shape)
        self.order = order
        live = self.there.gather(-1, order)

        def shuffled(x: Tensor) -> Tensor:
            found = x.gather(2, order[..., None].expand_as(x))
            return torch.where(live[..., None], found, torch.nan)

        mean = torch.randn(LAYERS, HEADS * GROUP, DIM, generator=draw)
        root = torch.randn(LAYERS, HEADS * GROUP, DIM, DIM, generator=draw) / 2
        self.moments = Moments(mean, root @ root.transpose(-1, -2))
        keys, values = shuffled(self.keys), shuffled(self.values)
        self.evidence = Evidence(
            order.int(), live, LENGTH, mass=self.mass.gather(-1, order), queries=self.queries, moments=self.moments,
            keys=lambda: keys, values=lambda: values, model=Model(SCALE, None, (None,) * LAYERS, lambda text: [], turn),
        )  # fmt: skip

    def by_token(self, policy: Scored) -> Tensor:
        """``[L, H, T]`` scores of the tokens that are there, 0 elsewhere."""
        found = policy.score(self.evidence)
        assert found.dtype == torch.float32
        placed = torch.zeros(LAYERS, HEADS, LENGTH).scatter(-1, self.order, found)
        return torch.where(self.there, placed, 0.0)

    def attention(self, layer: int, head: int, group: int, back: int) -> Tensor:
        """float64 ``[T]``, of the query ``back`` tokens before the end."""
        query = self.queries[layer, head * GROUP + group, -1 - back].double()
        logits = SCALE * self.keys[layer, head].double() @ query
        seen = self.there[layer, head] & (torch.arange(LENGTH) <= LENGTH - 1 - back)
        return torch.softmax(logits.masked_fill(~seen, -torch.inf), 0)

    def mean_attention(self, layer: int, head: int, window: int) -> Tensor:
        several = [self.attention(layer, head, group, back) for group in range(GROUP) for back in range(window)]
        return torch.stack(several).mean(0)


def each_head(rule: Callable[[int, int], Tensor]) -> Tensor:
    found = [[rule(layer, head).float() for head in range(HEADS)] for layer in range(LAYERS)]
    return torch.stack([torch.stack(heads) for heads in found])


def check(case: Case, policy: Scored, rule: Callable[[int, int], Tensor]) -> None:
    want = torch.where(case.there, each_head(rule), 0.0)
    torch.testing.assert_close(case.by_token(policy), want, rtol=1e-4, atol=1e-5)


def test_keydiff() -> None:
    case = Case()

    def rule(layer: int, head: int) -> Tensor:
        keys = case.keys[layer, head].double()
        units = keys / keys.norm(dim=-1, keepdim=True)
        anchor = units[case.there[layer, head]].mean(0)
        return -(units @ anchor) / anchor.norm()

    check(case, KeyDiff(9), rule)


def test_knorm() -> None:
    case = Case()
    check(case, Knorm(9), lambda layer, head: -case.keys[layer, head].norm(dim=-1))


def test_tova() -> None:
    case = Case(window=1)

    def rule(layer: int, head: int) -> Tensor:
        several = [case.attention(layer, other, group, 0) for other in range(HEADS) for group in range(GROUP)]
        return torch.stack(several).mean(0)

    check(case, TOVA(9), rule)


@pytest.mark.parametrize("kernel", [1, 5])
def test_snapkv(kernel: int) -> None:
    case = Case(window=6)

    def rule(layer: int, head: int) -> Tensor:
        mean = case.mean_attention(layer, head, 6)
        mean[-6:] = 0
        held = case.there[layer, head].nonzero()[:, 0].tolist()
        found = torch.zeros(LENGTH, dtype=torch.float64)
        for place, token in enumerate(held):
            near = held[max(0, place - kernel // 2) : place + kernel // 2 + 1]
            found[token] = mean[near].sum() / kernel
        return found

    policy = SnapKV(9, window=6, kernel=kernel)
    check(case, policy, rule)
    kept = policy.select(case.evidence, policy.score(case.evidence))
    assert (kept[case.evidence.positions >= LENGTH - 6]).all()
    assert (kept.sum(-1) == 9).all()


def test_expected_attention() -> None:
    case = Case()

    def rule(layer: int, head: int) -> Tensor:
        ahead = torch.arange(LENGTH, LENGTH + 7)
        axes = torch.eye(DIM, dtype=torch.float64)
        matrix = torch.stack([turn(axes, when.expand(DIM), layer).T for when in ahead]).mean(0)
        keys = case.keys[layer, head].double()
        total = torch.zeros(LENGTH, dtype=torch.float64)
        counted = case.there[layer, head] & (torch.arange(LENGTH) >= 4)
        for group in range(GROUP):
            mean = matrix @ case.moments.mean[layer, head * GROUP + group].double()
            spread = matrix @ case.moments.covariance[layer, head * GROUP + group].double() @ matrix.T
            logits = torch.stack([SCALE * key @ mean + SCALE**2 / 2 * key @ spread @ key for key in keys])
            total += torch.softmax(logits.masked_fill(~counted, -torch.inf), 0) / GROUP
        return total * case.values[layer, head].double().norm(dim=-1)

    check(case, ExpectedAttention(9, future=7), rule)


def test_r_kv() -> None:
    case = Case()

    def rule(layer: int, head: int) -> Tensor:
        held = case.there[layer, head].nonzero()[:, 0].tolist()
        attention = case.mean_attention(layer, head, 8)
        keys = torch.nn.functional.normalize(case.keys[layer, head].double(), dim=-1)
        alike = {
            (a, b): float(keys[a] @ keys[b]) for a in held for b in held if a != b and float(keys[a] @ keys[b]) > 0.5
        }
        for b in held:
            latest = max((a for a in held if (a, b) in alike), default=None)
            if latest is not None:
                alike.pop((latest, b))
        means = torch.tensor([sum(alike.get((a, b), 0.0) for b in held) / len(held) for a in held])
        found = torch.zeros(LENGTH, dtype=torch.float64)
        for place, token in enumerate(held):
            near = held[max(0, place - 3) : place + 4]
            found[token] = 0.1 * attention[near].max() - 0.9 * torch.softmax(means, 0)[place]
        return found

    # A token's own entry may be the latest it resembles: ties in the order of zeroing would show here.
    check(case, RKV(9), rule)


def test_r_kv_leaves_a_buffer_and_the_newest() -> None:
    case = Case()
    policy = RKV(16, buffer=3)
    kept = policy.select(case.evidence, policy.score(case.evidence))
    assert (kept.sum(-1) == 13).all()
    assert kept[case.evidence.positions >= LENGTH - 8].all()
    assert torch.equal(RKV(30).select(case.evidence, policy.score(case.evidence)), case.evidence.live)


def test_random_depends_on_positions_and_seed_only() -> None:
    case, other = Case(), Case()
    found = case.by_token(RandomChoice(9))
    assert torch.equal(found, other.by_token(RandomChoice(20, shape="model")))
    assert not torch.equal(found, case.by_token(RandomChoice(9, seed=1)))
    assert 0.4 < found[case.there].mean() < 0.6


def test_h2o_normalised_divides_by_age() -> None:
    case = Case()
    age = LENGTH - torch.arange(LENGTH)
    for policy, weight in ((H2O(8, 0), case.mass), (H2ONormalised(8, 0), case.mass / age)):
        kept = policy.decide(case.evidence).slots
        got = torch.zeros(LAYERS, HEADS, LENGTH, dtype=torch.bool).scatter(-1, case.order, kept)
        best = torch.where(case.there, weight, -1.0).topk(8, -1).indices
        assert torch.equal(got, torch.zeros_like(got).scatter(-1, best, True))


@pytest.mark.parametrize(
    "layers, tokens, length", [(30, 128, 512), (30, 384, 512), (2, 70, 100), (1, 80, 100), (4, 9, 50)]
)
def test_pyramid_kv_s_layers_fall_and_hold_the_budget(layers: int, tokens: int, length: int) -> None:
    budgets = PyramidKV(tokens).layer_budgets(layers, length).tolist()
    assert sum(budgets) <= tokens * layers < sum(budgets) + layers
    assert all(first >= second - 1 for first, second in pairwise(budgets))
    assert max(budgets) <= length
    if layers > 1 and tokens > 64:
        assert budgets[0] > budgets[-1]
