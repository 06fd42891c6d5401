"""Choosing tokens: what the definitions say, and draws that depend on seed and place alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvgate.serving.sampling import Sampling


def logits(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities).log()


def draws(sampling: Sampling, row: torch.Tensor, count: int = 4000) -> np.ndarray:
    """Shares of each id over ``count`` places."""
    found = [sampling.choose(row, [0] * place) for place in range(count)]
    return np.bincount(found, minlength=len(row)) / count


def test_draws_follow_the_distribution() -> None:
    row = logits(0.5, 0.3, 0.15, 0.05)
    assert np.abs(draws(Sampling(seed=3), row) - [0.5, 0.3, 0.15, 0.05]).max() < 0.03
    sharper = np.array([0.5, 0.3, 0.15, 0.05]) ** 2
    assert np.abs(draws(Sampling(temperature=0.5), row) - sharper / sharper.sum()).max() < 0.03


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_p=0.5), {0}),
        (Sampling(top_p=0.51), {0, 1}),
        (Sampling(top_p=0.0), {0}),
        (Sampling(top_k=2), {0, 1}),
        (Sampling(top_k=3, top_p=0.6), {0, 1}),
        (Sampling(top_k=2000), {0, 1, 2, 3}),
        (Sampling(top_k=1), {0}),
    ],
)
def test_the_smallest_set_that_reaches_top_p_of_the_top_k(sampling: Sampling, kept: set[int]) -> None:
    shares = draws(sampling, logits(0.5, 0.3, 0.15, 0.05), 600)
    assert {int(i) for i in np.flatnonzero(shares)} == kept


def test_a_flat_distribution_is_wider_than_the_shortlist() -> None:
    row = torch.zeros(5000)
    found = {Sampling(top_p=0.9, seed=s).choose(row, []) for s in range(300)}
    assert max(found) > 2000
    assert len(found) > 250


def test_the_same_seed_and_place_draw_the_same_and_others_differ() -> None:
    row = torch.randn(300, generator=torch.Generator().manual_seed(1))
    first = [Sampling(seed=7).choose(row, [1] * i) for i in range(20)]
    assert first == [Sampling(seed=7).choose(row, [2] * i) for i in range(20)]
    assert first != [Sampling(seed=8).choose(row, [1] * i) for i in range(20)]
    assert Sampling(seed=-1).choose(row, []) == Sampling(seed=-1).choose(row, [])


def test_temperature_zero_takes_the_likeliest_and_the_lower_id_of_equals() -> None:
    assert Sampling(temperature=0.0).choose(torch.tensor([1.0, 3.0, 3.0, 2.0]), []) == 1


def test_penalties_count_over_the_answer_and_bias_is_added() -> None:
    row = torch.tensor([2.0, 1.5, 1.0])
    assert Sampling(temperature=0.0, presence_penalty=0.6).choose(row, [0]) == 1
    assert Sampling(temperature=0.0, frequency_penalty=0.3).choose(row, [0]) == 0
    assert Sampling(temperature=0.0, frequency_penalty=0.3).choose(row, [0, 0]) == 1
    assert Sampling(temperature=0.0, bias={2: 5.0}).choose(row, []) == 2
    assert Sampling(temperature=0.0, bias={0: -100.0}).choose(row, []) == 1
    assert row.tolist() == [2.0, 1.5, 1.0], "the caller's logits stay as they are"
