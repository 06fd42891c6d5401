"""Long answers: every line listed, a list told twice, and what its depth says."""

from collections import Counter
from typing import Any

import pytest

from kvgate.cli.plan import slice_sizes
from kvgate.evals.data.items import Listing
from kvgate.evals.data.tokens import Tokens
from kvgate.evals.judge.gates import load_gate
from kvgate.evals.plan.config import SuiteChoice
from kvgate.evals.scoring.scores import score_answer
from kvgate.evals.suites.base import BuildSpec
from kvgate.evals.suites.catalog import suite_class


def test_long_answers_list_every_line(tokens: Tokens, chatml: Any) -> None:
    for item in suite_class("long_generation")().build(tokens, BuildSpec(counts={512: 1, 1024: 1})):
        turn = item.turns[0]
        assert isinstance(turn.scoring, Listing)
        answer = "\n".join(turn.scoring.expected)
        assert score_answer(answer, turn.scoring) == 1.0
        assert turn.max_new_tokens - 20 < len(tokens.encode(answer)) <= turn.max_new_tokens
        begun = chatml.decode(turn.prompt).strip().splitlines()
        if item.task == "count":
            numbers = [int(line.removeprefix("Item ")) for line in (*begun, *turn.scoring.expected)]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    with pytest.raises(ValueError, match="new_tokens"):
        suite_class("long_generation")().build(tokens, BuildSpec(options={"new_tokens": 0}))


def test_a_recited_list_is_told_twice_and_goes_round(tokens: Tokens, chatml: Any) -> None:
    for item in suite_class("long_generation")().build(tokens, BuildSpec(counts={512: 2, 1024: 1}, tasks=("recite",))):
        scoring = item.turns[0].scoring
        assert isinstance(scoring, Listing)
        (start, end), *_ = item.facts
        told = chatml.decode(item.context[start:end]).strip().splitlines()
        once = told[: len(told) // 2]
        assert told == once * 2
        begun = chatml.decode(item.turns[0].prompt).strip().splitlines()
        said = [*begun, *scoring.expected]
        assert len(said) > len(once)  # past the end of a round, so that losing the list shows
        assert once[1:][-3:] == begun[:3]
        assert all(line == once[(place - 3) % len(once)] for place, line in enumerate(said))
        # What is begun says little of it: the rest has to come from the context.
        assert len({*once} - {*begun}) >= len(once) // 2


def test_a_recited_list_is_at_its_depth_in_the_prose_only(tokens: Tokens) -> None:
    """Depth is the share of the other text that comes before the list: where the list starts only in long contexts.

    At 512 tokens the list is most of the context, and lists at any two depths overlap.
    """
    spec = BuildSpec(counts={512: 3, 2048: 3}, depths=(0.1, 0.5, 0.9), tasks=("recite",))
    items = suite_class("long_generation")().build(tokens, spec)
    assert {(item.length, item.depth) for item in items} == {(n, d) for n in (512, 2048) for d in (0.1, 0.5, 0.9)}
    for item in items:
        ((start, end),) = item.facts
        prose = item.length - (end - start)
        assert item.depth is not None
        # A list starts where a sentence does, so short prose gives it few places.
        assert abs(start / prose - item.depth) < (0.2 if item.length == 2048 else 0.4), (item.depth, start, prose)
    short = [item.facts[0] for item in items if item.length == 512]
    assert all(end - start > 256 for start, end in short)
    assert min(end for _, end in short) - max(start for start, _ in short) > 256, "the same tokens at every depth"


def test_a_list_too_short_to_lose_is_refused(tokens: Tokens) -> None:
    with pytest.raises(ValueError, match="128 tokens are too few for a list of rooms"):
        suite_class("long_generation")().build(tokens, BuildSpec(counts={128: 1}, tasks=("recite",)))


def test_a_plan_counts_the_slices_that_are_built(tokens: Tokens) -> None:
    counts, depths, gate = {512: 4, 1024: 5}, (0.1, 0.5, 0.9), load_gate("production")
    choice = SuiteChoice("long_generation", counts, depths)
    items = suite_class("long_generation")().build(tokens, BuildSpec(counts=counts, depths=depths))
    built = Counter((item.length, gate.depth_bin(item.depth)) for item in items)
    assert slice_sizes(choice, gate, ("length", "depth")) == sorted(built.values())
    assert len(built) == 8  # three depths of reciting and the count, at two lengths
