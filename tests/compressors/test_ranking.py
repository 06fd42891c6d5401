"""Exact ranking: any scores, ties by lower position, nothing that a score could tie with."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgate.compressors.ranking import keep_highest, score_keys

# Few values, so that ties are the rule; the extremes of fp32, denormals and both zeros among them.
SCORES = st.sampled_from(
    [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 3.4028234663852886e38, -3.4028234663852886e38, math.inf, -math.inf, math.nan]
)


def order_of(score: float) -> tuple[int, float]:
    """A sort key written down independently: NaN above infinity; the two zeros are equal."""
    return (1, 0.0) if math.isnan(score) else (0, score)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_the_highest_win_and_ties_go_to_the_lower_position(data: st.DataObject) -> None:
    slots = data.draw(st.integers(1, 12))
    scores = data.draw(st.lists(SCORES, min_size=slots, max_size=slots))
    positions = data.draw(
        st.lists(st.integers(0, 40) | st.just(2**31 - 1), min_size=slots, max_size=slots, unique=True)
    )
    eligible = data.draw(st.lists(st.booleans(), min_size=slots, max_size=slots))
    count = data.draw(st.integers(-2, slots + 2))

    keys = score_keys(torch.tensor([[scores]]), torch.tensor([[positions]], dtype=torch.int32))
    got = keep_highest(keys, torch.tensor([[eligible]]), torch.tensor([[count]]))[0, 0].tolist()

    best = sorted(
        (slot for slot in range(slots) if eligible[slot]),
        key=lambda slot: (*order_of(scores[slot]), -positions[slot]),
        reverse=True,
    )
    assert {slot for slot in range(slots) if got[slot]} == set(best[: max(0, count)])


def test_every_head_drops_its_own_number() -> None:
    keys = torch.arange(10).expand(2, 3, 10)
    counts = torch.tensor([[0, 1, 10], [11, 5, -3]])
    kept = keep_highest(keys, torch.ones(2, 3, 10, dtype=torch.bool), counts)
    assert kept.sum(-1).tolist() == [[0, 1, 10], [10, 5, 0]]
    assert kept[1, 1].nonzero().flatten().tolist() == [5, 6, 7, 8, 9]


def test_the_largest_score_at_position_zero_is_no_marker() -> None:
    """The highest key there is (NaN with a clear sign at position 0) is ranked like any other."""
    scores = torch.tensor([[[float("nan"), float("nan"), float("inf")]]])
    keys = score_keys(scores, torch.tensor([[[0, 1, 2]]], dtype=torch.int32))
    everything = torch.ones(1, 1, 3, dtype=torch.bool)
    assert keep_highest(keys, everything, torch.tensor([[1]])).tolist() == [[[True, False, False]]]
    assert not keep_highest(keys, everything, torch.tensor([[0]])).any()


def test_a_nan_with_its_sign_bit_set_ranks_like_any_nan() -> None:
    negative_nan = torch.tensor([0xFFC00000 - 2**32], dtype=torch.int32).view(torch.float32)
    scores = torch.cat((torch.tensor([math.inf, 0.0]), negative_nan))[None, None]
    keys = score_keys(scores, torch.arange(3, dtype=torch.int32)[None, None])
    kept = keep_highest(keys, torch.ones(1, 1, 3, dtype=torch.bool), torch.tensor([[1]]))
    assert kept.tolist() == [[[False, False, True]]]


def test_scores_in_a_strided_view_rank_like_their_copy() -> None:
    scores = torch.rand(4, 3, 20, generator=torch.Generator().manual_seed(1))[..., ::2]
    positions = torch.arange(10, dtype=torch.int32).expand(4, 3, 10)
    assert torch.equal(score_keys(scores, positions), score_keys(scores.clone(), positions.clone()))
