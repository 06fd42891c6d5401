"""Scores in [0, 1] for answers. One normaliser, used by every suite and by the hub loaders.

A match needs whole words: 12345678 is not 1234567, and ``cat`` is not in ``category``. Signs and decimals belong to a
number (-5 is not 5, 3.14 is not 3), and a comma between digit groups of three is dropped, so 1,234,567 is 1234567: models
write long numbers both ways and the value is the same.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from kvgate.evals.items import Exact

_GROUPS = re.compile(r"(?<![\w.])(?<!\d,)\d{1,3}(?:,\d{3})+(?!\w|,\d)")
_WORD = re.compile(r"(?:(?<![\w)\]])-(?=\d))?\w+(?:(?<=\d)\.(?=\d)\w+)*")
_MINUS = str.maketrans({"\u2212": "-"})


def first_line(text: str) -> str:
    """The first line that is not blank, stripped."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def normalise(text: str) -> tuple[str, ...]:
    """The words of ``text``: NFKC, case folded, digit groups joined, punctuation dropped, underscores kept."""
    folded = unicodedata.normalize("NFKC", text).translate(_MINUS).casefold()
    return tuple(_WORD.findall(_GROUPS.sub(lambda found: found.group().replace(",", ""), folded)))


def score_exact(text: str, exact: Exact) -> float:
    """1.0 if the answer's first line holds an accepted answer ("word") or begins with one ("first"), else 0.0."""
    line = first_line(text)
    said = normalise(line)
    return float(any(_holds(said, line, accepted, exact.match == "first") for accepted in exact.accept))


def _holds(said: tuple[str, ...], line: str, accepted: str, at_start: bool) -> bool:
    wanted = normalise(accepted)
    if not wanted:  # punctuation only: nothing is left to compare but the text itself
        return line == accepted.strip()
    starts = range(1 if at_start else len(said) - len(wanted) + 1)
    return any(said[start : start + len(wanted)] == wanted for start in starts)


def score_choice(mean_log_probs: Sequence[float], gold: int) -> float:
    """1.0 if the gold candidate is strictly the likeliest per token. A tie or a NaN is not right."""
    best = mean_log_probs[gold]
    return float(all(best > other for rank, other in enumerate(mean_log_probs) if rank != gold))
