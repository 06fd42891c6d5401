"""Scores in [0, 1] for answers, on the words that :mod:`kvgate.evals.normalising` finds."""

from __future__ import annotations

from collections.abc import Sequence

from kvgate.evals.items import Answer, Exact, Listing, Recall, Rule
from kvgate.evals.normalising import first_line, has_run, normalise
from kvgate.evals.scoring_rules import obeys


def score_answer(text: str, scoring: Answer) -> float:
    """Score in [0, 1] of a generated answer."""
    match scoring:
        case Exact():
            return score_exact(text, scoring)
        case Recall():
            return score_recall(text, scoring)
        case Listing():
            return score_listing(text, scoring)
        case Rule():
            return float(obeys(text, scoring))


def score_exact(text: str, exact: Exact) -> float:
    """1.0 if the answer's first line holds an accepted answer ("word") or begins with one ("first"), else 0.0."""
    line = first_line(text)
    said = normalise(line)
    return float(any(_holds(said, line, accepted, exact.match == "first") for accepted in exact.accept))


def score_recall(text: str, recall: Recall) -> float:
    """Share of the expected answers that occur, as whole words, anywhere in the answer."""
    said = normalise(text)
    return sum(_holds(said, text.strip(), wanted, False) for wanted in recall.expected) / len(recall.expected)


def score_listing(text: str, listing: Listing) -> float:
    """Share of the expected lines at their places; blank lines do not count as lines."""
    lines = [normalise(line) for line in text.splitlines() if line.strip()]
    hits = sum(line == normalise(wanted) for line, wanted in zip(lines, listing.expected, strict=False))
    return hits / len(listing.expected)


def _holds(said: tuple[str, ...], line: str, accepted: str, at_start: bool) -> bool:
    wanted = normalise(accepted)
    if not wanted:  # punctuation only: nothing is left to compare but the text itself
        return line == accepted.strip()
    return said[: len(wanted)] == wanted if at_start else has_run(said, wanted)


def score_choice(mean_log_probs: Sequence[float], gold: int) -> float:
    """1.0 if the gold candidate is strictly the likeliest per token. A tie or a NaN is not right."""
    best = mean_log_probs[gold]
    return float(all(best > other for rank, other in enumerate(mean_log_probs) if rank != gold))
