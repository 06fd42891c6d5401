"""Scores in [0, 1] for answers, on the words that :mod:`kvgate.evals.scoring.normaliser` finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvgate.evals.data.items import Answer, Exact, Listing, Overlap, Recall, Rule
from kvgate.evals.scoring.instruction_checks import obeys
from kvgate.evals.scoring.normaliser import first_line, has_run, normalise


def score_answer(text: str, scoring: Answer) -> float:
    """Score in [0, 1] of a generated answer."""
    match scoring:
        case Exact():
            return score_exact(text, scoring)
        case Recall():
            return score_recall(text, scoring)
        case Listing():
            return score_listing(text, scoring)
        case Overlap():
            return score_overlap(text, scoring)
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


def score_overlap(text: str, overlap: Overlap) -> float:
    """Best likeness over the accepted answers."""
    likeness = _f1 if overlap.measure == "f1" else _edit
    return max(likeness(text, accepted) for accepted in overlap.accept)


def _f1(text: str, accepted: str) -> float:
    """F1 of the bags of words (SQuAD, Rajpurkar et al. 2016, arXiv:1606.05250, section 6.1), articles included."""
    said, wanted = Counter(normalise(text)), Counter(normalise(accepted))
    common = (said & wanted).total()
    return 2 * common / (said.total() + wanted.total()) if common else 0.0


def _edit(text: str, accepted: str) -> float:
    """1 - Levenshtein distance / longer length, of the first lines (RepoBench, arXiv:2306.03091, section 4)."""
    said, wanted = first_line(text), first_line(accepted)
    if not said or not wanted:
        return float(said == wanted)
    row = list(range(len(wanted) + 1))
    for place, letter in enumerate(said, 1):
        before, row[0] = row[0], place
        for column, other in enumerate(wanted, 1):
            before, row[column] = row[column], min(row[column] + 1, row[column - 1] + 1, before + (letter != other))
    return 1 - row[-1] / max(len(said), len(wanted))


def _holds(said: tuple[str, ...], line: str, accepted: str, at_start: bool) -> bool:
    wanted = normalise(accepted)
    if not wanted:  # punctuation only: nothing is left to compare but the text itself
        return line == accepted.strip()
    return said[: len(wanted)] == wanted if at_start else has_run(said, wanted)


def score_choice(mean_log_probs: Sequence[float], gold: int) -> float:
    """1.0 if the gold candidate is strictly the likeliest per token. A tie or a NaN is not right."""
    best = mean_log_probs[gold]
    return float(all(best > other for rank, other in enumerate(mean_log_probs) if rank != gold))
