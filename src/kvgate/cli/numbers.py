"""Numbers of the command line, with their limits: nothing runs or is allocated by a number that nobody meant."""

from __future__ import annotations

import argparse
from collections.abc import Callable

MOST_BLOCKS = 1 << 24
MOST_SEED = (1 << 63) - 1


def whole(least: int, most: int) -> Callable[[str], int]:
    """Reads a whole number from ``least`` to ``most``."""

    def read(text: str) -> int:
        try:
            value = int(text) if len(text) < 40 else most + 1
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r:.40} is no whole number") from error
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text:.40} is not from {least} to {most}")
        return value

    return read


def real(low: float, high: float, *, inside: bool = False) -> Callable[[str], float]:
    """Reads a number from ``low`` to ``high``; ``inside``: neither of the two."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r:.40} is no number") from error
        if not (low < value < high if inside else low <= value <= high):  # nor is NaN
            raise argparse.ArgumentTypeError(
                f"{text:.40} is not {'between' if inside else 'from'} {low:g} {'and' if inside else 'to'} {high:g}"
            )
        return value

    return read
