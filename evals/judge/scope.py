"""Where a verdict holds: the suites and lengths at which something was tested and the exact run was competent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from kvgate.evals.judge.pairs import Pair
from kvgate.evals.judge.rules import JudgedSuite
from kvgate.evals.judge.types import Scope


def scope_of(protocol: str, pairs: Sequence[Pair], judged: Sequence[JudgedSuite]) -> Scope:
    """Scope of a row. Lengths stop below the first at which a suite has no slice in scope."""
    acting = {part.suite.suite: _lengths(part.pairs) for part in judged}
    kept = {part.suite.suite: _lengths(part.kept) for part in judged}
    tested = sorted(set().union(*acting.values()))
    held = takewhile(lambda length: all(length in kept[suite] for suite in acting if length in acting[suite]), tested)
    lengths = tuple(held)
    return Scope(
        protocol=protocol,
        suites=tuple(acting),
        lengths=lengths,
        longest_tokens=max(
            (pair.policy.context_tokens for part in judged for pair in part.kept if pair.policy.length in lengths),
            default=0,
        ),
        excluded=tuple(entry.name for part in judged for entry in part.slices if entry.status == "not_evaluable"),
        covered_lengths=tuple(sorted(_lengths(pairs) - set(tested))),
    )


def _lengths(pairs: Iterable[Pair]) -> set[int]:
    return {pair.policy.length for pair in pairs}
