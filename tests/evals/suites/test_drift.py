"""Repetition, loops and length drift of long answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.evals.drift import length_drift, loop_start, repetition

IDS = st.lists(st.integers(0, 5), max_size=40)


def test_repetition() -> None:
    assert repetition(range(10)) == 0.0
    assert repetition([1] * 10) == pytest.approx(1 - 1 / 7)
    assert repetition([1, 2]) == 0.0
    with pytest.raises(ValueError, match="n is 0"):
        repetition([1], 0)


@given(IDS)
def test_repetition_is_a_share(ids: list[int]) -> None:
    assert 0.0 <= repetition(ids) < 1.0


def test_loop_start() -> None:
    assert loop_start([7, 8, 9]) is None
    assert loop_start([7, 8, 1, 2, 1, 2, 1, 2]) == 2
    assert loop_start([7, 8, 1, 2, 1, 2]) is None
    assert loop_start([5, 5, 5]) == 0
    assert loop_start([]) is None


@given(IDS, st.lists(st.integers(6, 9), min_size=1, max_size=6), st.integers(3, 5))
def test_a_loop_is_found(before: list[int], period: list[int], times: int) -> None:
    found = loop_start(before + period * times)
    assert found is not None
    assert found >= len(before)  # the words before are of another alphabet


def test_length_drift() -> None:
    assert length_drift(110, 100) == pytest.approx(0.1)
    assert length_drift(0, 100) == -1.0
    assert length_drift(5, 0) is None
