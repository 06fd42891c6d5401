"""Greedy answers and likelihoods, on tiny models."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvgate.compressors.sliding_window import SlidingWindow
from kvgate.compressors.streaming_llm import StreamingLLM
from kvgate.engine.generate import Generated, continuation_scores, generate

Fixture = Callable[..., Any]
NONE: frozenset[int] = frozenset()


def greedy(model: Any, tokens: list[int], count: int) -> list[int]:
    seen = list(tokens)
    for _ in range(count):
        seen.append(int(model.logits(seen)[-1].argmax()))
    return seen[len(tokens) :]


def test_rows_of_many_lengths_answer_as_the_model_does(tiny: Fixture, text: Fixture) -> None:
    model = tiny("llama")
    engine = model.engine()
    texts = [text(length, length) for length in (5, 19, 33)]
    prefilled = [engine.prefill(tokens) for tokens in texts]
    rows = [row for row, _ in prefilled]
    logits = torch.stack([last for _, last in prefilled])
    answers = generate(engine, rows, logits, [9, 4, 1], [NONE] * 3)
    for tokens, limit, answer, row in zip(texts, (9, 4, 1), answers, rows, strict=True):
        assert answer.tokens == greedy(model, tokens, limit)
        assert answer.capped
        assert not answer.nan
        assert answer.pending == answer.tokens[-1:], "the last token was never fed"
        assert row.length == len(tokens) + limit - 1


def test_the_first_token_may_end_the_answer(tiny: Fixture, text: Fixture) -> None:
    """Elsewhere the end of sequence on the first token was missed and generation ran to the limit."""
    model = tiny("llama")
    engine = model.engine()
    row, logits = engine.prefill(text(20))
    first = int(logits.argmax())
    (answer,) = generate(engine, [row], logits[None], [8], [frozenset({first})])
    assert answer == Generated(tokens=[], capped=False, nan=False, pending=[])
    assert row.length == 20, "nothing was fed"


def test_a_stop_id_in_the_middle_ends_its_row_only(tiny: Fixture, text: Fixture) -> None:
    model = tiny("llama")
    engine = model.engine()
    want = greedy(model, text(20), 8)
    stop = next(token for token in want[1:] if token != want[0])
    at = want.index(stop)
    row, logits = engine.prefill(text(20))
    rows = [row, engine.fork(row)]
    stopped, free = generate(engine, rows, logits.expand(2, -1), [8, 8], [frozenset({stop}), NONE])
    assert stopped.tokens == want[:at]
    assert not stopped.capped
    assert stopped.pending == []
    assert free.tokens == want


def test_a_stop_id_right_at_the_limit_does_not_count_as_cut(tiny: Fixture, text: Fixture) -> None:
    model = tiny("llama")
    want = greedy(model, text(20), 3)
    engine = model.engine()
    row, logits = engine.prefill(text(20))
    (answer,) = generate(engine, [row], logits[None], [2], [frozenset({want[2]})])
    assert answer.tokens == want[:2]
    assert answer.capped, "the limit was reached before the stop could be seen"


def test_nan_ends_an_answer_and_says_so(tiny: Fixture, text: Fixture) -> None:
    engine = tiny("llama").engine()
    row, logits = engine.prefill(text(20))
    other = engine.fork(row)
    broken = torch.stack((logits, logits))
    broken[0, 7] = torch.nan
    first, second = generate(engine, [row, other], broken, [3, 3], [NONE, NONE])
    assert first.nan
    assert first.tokens == []
    assert not second.nan
    assert len(second.tokens) == 3


def test_ties_go_to_the_lower_id(tiny: Fixture, text: Fixture) -> None:
    engine = tiny("llama").engine()
    row, logits = engine.prefill(text(20))
    (answer,) = generate(engine, [row], torch.zeros_like(logits)[None], [1], [NONE])
    assert answer.tokens == [0]


def test_likelihoods_are_the_model_s(tiny: Fixture, text: Fixture) -> None:
    model = tiny("llama")
    engine = model.engine()
    texts = [text(20), text(31, 1)]
    candidates = [[[5], [6, 7], text(9, 2)], [text(4, 3), [8]]]
    prefilled = [engine.prefill(tokens) for tokens in texts]
    rows = [row for row, _ in prefilled]
    logits = torch.stack([last for _, last in prefilled])
    held = engine.tables.pool.free
    got = continuation_scores(engine, rows, logits, candidates)
    for tokens, row_candidates, scores in zip(texts, candidates, got, strict=True):
        for candidate, score in zip(row_candidates, scores, strict=True):
            logprobs = model.logits([*tokens, *candidate]).log_softmax(-1)[len(tokens) - 1 : -1]
            want = logprobs.gather(-1, torch.tensor(candidate)[:, None]).mean()
            assert score == pytest.approx(float(want), abs=1e-4)
    assert engine.tables.pool.free == held, "candidates leave nothing behind"
    assert [row.length for row in rows] == [20, 31]
    assert got == continuation_scores(engine, rows, logits, candidates)


def test_likelihoods_on_an_evicted_cache_are_those_of_feeding_the_candidate(tiny: Fixture, text: Fixture) -> None:
    engine = tiny("llama").engine()
    parent, _ = engine.prefill(text(30))
    for policy in (SlidingWindow(7), StreamingLLM(6, 3, "rebased")):
        row = engine.fork(parent, policy)
        logits = engine.extend([row], [[5]])
        candidate = text(6, 4)
        twin = engine.fork(row)
        total = float(logits.log_softmax(-1)[0, candidate[0]])
        for token, after in itertools.pairwise(candidate):
            total += float(engine.extend([twin], [[token]]).log_softmax(-1)[0, after])
        ((score,),) = continuation_scores(engine, [row], logits, [[candidate]])
        assert score == pytest.approx(total / 6, abs=1e-4)


def test_a_stop_before_anything_is_said_is_part_of_the_answer(tiny: Fixture, text: Fixture) -> None:
    """A newline in front of an answer: leading blank lines are not the answer."""
    model = tiny("llama")
    engine = model.engine()
    want = greedy(model, text(20), 8)
    blank = want[0]
    row, logits = engine.prefill(text(20))

    def unsaid(index: int, tokens: Any) -> bool:
        return set(tokens) == {blank}

    later = next((at for at, token in enumerate(want) if token == blank and set(want[: at + 1]) != {blank}), 8)
    (answer,) = generate(engine, [row], logits[None], [8], [frozenset({blank})], unsaid=unsaid)
    assert answer.tokens == want[:later]
    assert len(answer.tokens) > 1
