"""A recorded answer scored again, without the model: does the record say what its own tokens and figures give?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvgate.evals.data.items import Choice, External, Fidelity, Item, Turn, candidates_of
from kvgate.evals.log.records import CellRecord, TurnRecord
from kvgate.evals.scoring.scores import score_answer, score_choice

Decode = Callable[[list[int]], str]


def contradictions(
    item: Item, record: CellRecord, exact: CellRecord, stop_ids: Sequence[int], decode: Decode
) -> Iterator[tuple[str, Any, Any]]:
    """(field, recorded value, value it should have) of all that a record says wrongly about its own answers.

    ``exact``: the exact run's record on the item. ``stop_ids``: the model's. ``decode``: the tokenizer's.
    """
    if len(record.turns) != len(item.turns):
        yield "turns", len(record.turns), len(item.turns)
        return
    for place, (turn, said, led) in enumerate(zip(item.turns, record.turns, exact.turns, strict=True)):
        for field, was, now in _turn(turn, said, led, stop_ids, decode, record.nan):
            yield f"turns[{place}].{field}", was, now
    scores = [turn.score for turn in record.turns if turn.score is not None]
    if not scores:
        yield "turns", "no scored turn", "at least one"
        return
    for field, was, now in (
        ("score", record.score, sum(scores) / len(scores)),
        ("output_tokens", record.output_tokens, sum(len(turn.tokens) for turn in record.turns)),
    ):
        if was != now:
            yield field, was, now


def _turn(
    turn: Turn, said: TurnRecord, led: TurnRecord, stop_ids: Sequence[int], decode: Decode, nan: bool
) -> Iterator[tuple[str, Any, Any]]:
    if said.label != turn.label:
        yield "label", said.label, turn.label
    if (text := decode(list(said.tokens))) != said.text:
        yield "text", said.text, text
    if isinstance(turn.scoring, Choice):
        yield from _choice(turn.scoring, said, nan)
    elif isinstance(turn.scoring, Fidelity):
        yield from _fidelity(said, led, nan)
    elif not candidates_of(turn):
        yield from _written(turn, said, stop_ids, decode)


def _written(turn: Turn, said: TurnRecord, stop_ids: Sequence[int], decode: Decode) -> Iterator[tuple[str, Any, Any]]:
    """An answer in the model's own words: no longer than allowed, without its end, scored by its text."""
    most = turn.max_new_tokens
    if len(said.tokens) > most or (said.capped and len(said.tokens) < most):
        yield "tokens", len(said.tokens), f"{'exactly' if said.capped else 'at most'} {most}"
    begun = next(
        (at for at in range(len(said.tokens)) if decode(list(said.tokens[: at + 1])).strip()), len(said.tokens)
    )
    if ends := {*stop_ids} & set(said.tokens) | {*turn.stop} & set(said.tokens[begun:]):
        yield "tokens", f"go on after the end {min(ends)}", "end there"
    scoring = turn.scoring
    assert not isinstance(scoring, Choice | Fidelity)
    score = None if scoring is None else 0.0 if isinstance(scoring, External) else score_answer(said.text, scoring)
    if said.score != score:
        yield "score", said.score, score


def _choice(choice: Choice, said: TurnRecord, nan: bool) -> Iterator[tuple[str, Any, Any]]:
    given = said.candidate_scores or ()
    if len(given) != len(choice.candidates):
        yield "candidate_scores", len(given), len(choice.candidates)
        return
    # JSON has neither: what is no number is a NaN where one was seen, else a candidate without any probability.
    scores = [(math.nan if nan else -math.inf) if value is None else value for value in given]
    best = max(range(len(scores)), key=scores.__getitem__)
    for field, was, now in (
        ("chosen", said.chosen, best),
        ("tokens", said.tokens, choice.candidates[best]),
        ("score", said.score, score_choice(scores, choice.gold)),
    ):
        if was != now:
            yield field, was, now


def _fidelity(said: TurnRecord, led: TurnRecord, nan: bool) -> Iterator[tuple[str, Any, Any]]:
    found = said.fidelity
    if found is None:
        yield "fidelity", None, "a record"
        return
    if nan:  # positions after a NaN of the exact run are in neither; the row is invalid anyway
        return
    ends = () if found.end_agreed is None else (found.end_agreed,)
    agree = [own == spoken for own, spoken in zip(said.tokens, led.tokens, strict=False)] + list(ends)
    for field, was, now in (
        ("tokens", len(said.tokens), len(led.tokens)),
        ("fidelity.kl", len(found.kl), len(agree)),
        ("fidelity.diverged", found.diverged, agree.index(False) if False in agree else None),
        ("score", said.score, sum(agree) / len(agree) if agree else 0.0),
    ):
        if was != now:
            yield field, was, now
