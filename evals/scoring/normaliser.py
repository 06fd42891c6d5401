"""The one normaliser of answers, used by every suite and by the hub loaders.

A match needs whole words: 12345678 is not 1234567, and ``cat`` is not in ``category``. Signs and decimals belong to a
number (-5 is not 5, 3.14 is not 3), and a comma between digit groups of three is dropped, so 1,234,567 is 1234567:
models write long numbers both ways and the value is the same.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

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


def has_run(said: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether ``wanted`` occurs in ``said`` as a run of whole words."""
    return any(said[start : start + len(wanted)] == wanted for start in range(len(said) - len(wanted) + 1))
