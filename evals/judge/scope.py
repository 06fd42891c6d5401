"""Where a verdict holds: the suites and lengths at which something was tested and the exact run was competent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import get_args

from kvgate.evals.judge.columns import Columns, Indices, SliceKey
from kvgate.evals.judge.gates import Gate
from kvgate.evals.judge.rules import JudgedSuite
from kvgate.evals.judge.types import Scope


def scope_of(protocol: str, lengths: set[int], judged: Sequence[JudgedSuite], gate: Gate) -> Scope:
    """Scope of a row that was run at ``lengths``. They stop below the first at which a suite has no slice in scope."""
    acting = {part.suite.suite: _lengths(part.data, part.data.everything) for part in judged}
    kept = {part.suite.suite: _lengths(part.data, part.kept) for part in judged}
    tested = sorted(set().union(*acting.values()))
    held = takewhile(lambda length: all(length in kept[suite] for suite in acting if length in acting[suite]), tested)
    within = tuple(held)
    return Scope(
        protocol=protocol,
        suites=tuple(acting),
        lengths=within,
        longest_tokens=max((_longest(part, within) for part in judged), default=0),
        excluded=tuple(entry.name for part in judged for entry in part.slices if entry.status == "not_evaluable"),
        covered_lengths=tuple(sorted(lengths - set(tested))),
        pooled=tuple(text for part in judged for text in _pooled(part.data, gate)),
    )


def _longest(part: JudgedSuite, lengths: Sequence[int]) -> int:
    column = part.data.layout.keys["length"]
    return max((int(part.data.context_tokens[item]) for item in part.kept if column[item] in lengths), default=0)


def _lengths(data: Columns, items: Indices) -> set[int]:
    return {length for length in data.layout.keys["length"][items] if length is not None}


def _pooled(data: Columns, gate: Gate) -> Iterator[str]:
    """What differs between the items of a suite and is judged together all the same."""
    values = {key: set(data.layout.keys[key]) for key in get_args(SliceKey)}
    many = [key for key in get_args(SliceKey) if len(values[key]) > 1]
    told = [tuple(key for key in keys if key in many) for keys in gate.groupings]
    for key in many:
        if not any(key in keys for keys in told):
            yield f"{data.suite}: {len(values[key])} values of {key} judged together"
    apart = [key for key in many if any(key in keys for keys in told)]
    if len(apart) > 1 and not any(set(apart) <= set(keys) for keys in told):
        yield f"{data.suite}: {' and '.join(apart)} judged one at a time, not crossed"
