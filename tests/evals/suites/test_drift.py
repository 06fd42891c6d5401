"""Repetition, loops and length drift of long answers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.evals.leaderboard.drift import drifts, loop_start, repetition
from kvgate.evals.log.records import CellRecord, FidelityRecord, TurnRecord

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


def _cell(label: str, item: str, *answers: list[int]) -> CellRecord:
    turns = tuple(TurnRecord("a", 1.0, tuple(answer), "", capped=False) for answer in answers)
    return CellRecord(
        cell_id=f"{label}{item}", config_hash="c", suite="s", task="t", index=0, length=512, depth=None, cluster=item,
        item_hash=item, context_hash=item, protocol="question_unseen", policy=label, label=label, params={},
        budget=None, ratio=None, score=1.0, turns=turns, evicted_tokens=1.0, native=False, covered=False, floored=False,
        resident_bytes=1, logical_bytes=1, exact_resident_bytes=1, context_tokens=512, output_tokens=1, nan=False,
    )  # fmt: skip


def test_a_policy_is_compared_with_the_exact_run() -> None:
    long, looped = list(range(100)), [7] * 50
    exact = {item: _cell("full", item, long, [1]) for item in ("one", "two")}
    cells = [_cell("p@0.5", "one", looped, list(range(70))), _cell("p@0.5", "two", long, [1])]
    (found,) = drifts(cells, exact)
    assert (found.suite, found.task, found.length, found.answers) == ("s", "t", 512, 2)
    assert (found.tokens, found.exact_tokens) == (75, 100)
    assert found.length_drift == pytest.approx(-0.25)
    assert found.repetition == pytest.approx((1 - 1 / 47) / 2)
    assert found.exact_repetition == 0.0
    assert (found.loops, found.exact_loops) == (1, 0)


def test_short_answers_and_followed_ones_are_left_out() -> None:
    exact = {"one": _cell("full", "one", [1, 2, 3])}
    policy = _cell("p@0.5", "one", list(range(100)))
    assert drifts([policy], exact) == []
    assert [each.answers for each in drifts([policy], exact, least=3)] == [1]
    followed = replace(policy.turns[0], fidelity=FidelityRecord(kl=(0.0,), diverged=None))
    assert drifts([replace(policy, turns=(followed,))], exact, least=3) == []
