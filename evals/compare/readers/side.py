"""One side of a comparison as logs hold it, and two sides joined."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvgate.evals.compare.judge import ScoredPair


@dataclass(frozen=True)
class Entry:
    """A scored item of one log; ``identity``: hashes or texts that both sides must share, by name."""

    score: float
    cluster: str | None = None
    identity: Mapping[str, str] | None = None


Side = Mapping[tuple[str, str], Entry]
"""(task, item) to what one log says of it."""


def joined(exact: Side, candidate: Side, names: tuple[str, str]) -> list[ScoredPair]:
    """Pairs in order of the exact side. ValueError for items of one side only, or that are not the same item."""
    for mine, other, (here, there) in ((exact, candidate, names), (candidate, exact, names[::-1])):
        missing = [key for key in mine if key not in other]
        if missing:
            raise ValueError(
                f"{there}: lacks {len(missing)} of {len(mine)} items of {here}, {'/'.join(missing[0])} first; both "
                "sides must have answered the same items"
            )
    pairs = []
    for key, one in exact.items():
        two = candidate[key]
        for name, value in (one.identity or {}).items():
            if (two.identity or {}).get(name) != value:
                raise ValueError(
                    f"{'/'.join(key)}: {name} differs between {names[0]} and {names[1]}; not the same item"
                )
        pairs.append(ScoredPair(*key, one.cluster, one.score, two.score))
    return pairs


def in_range(value: object, metric: str, where: str) -> float:
    """A score. ValueError names a metric that is none: not a number, or outside [0, 1]."""
    number = isinstance(value, int | float)
    if not number or not 0.0 <= float(value) <= 1.0:  # type: ignore[arg-type]
        raise ValueError(
            f"{where}: metric {metric} is {value!r:.40}; only metrics in [0, 1] that are best when high can be judged: "
            "name one with --metric"
        )
    return float(value)  # type: ignore[arg-type]
