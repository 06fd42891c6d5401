"""Use late what was defined early, in real code with fresh names.

Files of the standard library are renamed (see :mod:`kvgate.evals.suites.renaming`) and cut at top-level statements.
Definitions of the same shape are set between the statements; one of them is asked for after the code ends.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import ClassVar

from kvgate.evals.chat import Tokens
from kvgate.evals.items import Choice, Exact, Ids, Item, Turn
from kvgate.evals.sources import fingerprint, lay, library_files, library_root, parse
from kvgate.evals.suites import words
from kvgate.evals.suites.base import Spot, Suite
from kvgate.evals.suites.completion import sites
from kvgate.evals.suites.renaming import in_style, rename

DEFINITIONS, EXAMPLES = 5, 2
MAX_BLOCK = 1200  # characters; longer statements leave too few borders
TAIL = 24  # tokens of code between the end of the context and the completed identifier


class Code(Suite):
    """Constants, labels, signatures and identifiers."""

    name = "code"
    measures = "Whether a definition early in a file can still be used correctly at its end."
    why_eviction_hurts = (
        "A definition is read once and needed much later. Until it is used nothing attends to it, so scores built from "
        "attention see no reason to keep it; a recent window has lost it."
    )
    tasks: ClassVar = {
        "constant": "an integer constant; its value is asserted at the end",
        "label": "a string constant; its value is asserted at the end",
        "signature": "a function's parameters, in order",
        "completion": "the likeliest of four identifiers where the file itself uses one it defined long before",
    }
    loose_depths = frozenset({"completion"})

    def make(self, tokens: Tokens, spot: Spot) -> list[Item]:
        """One item: code of exactly ``spot.length`` ids and one question. Cluster: the file."""
        return [_completion(tokens, spot) if spot.task == "completion" else _asserted(tokens, spot)]


def _asserted(tokens: Tokens, spot: Spot) -> Item:
    names, values, define, ask = SHAPES[spot.task](spot)
    path, blocks = _code(tokens, spot)
    depths = [spot.depth, *(spot.rng.random() for _ in names[1:])]
    needles = [
        (depth, tokens.encode("\n" + define(name, value)))
        for depth, name, value in zip(depths, names, values, strict=True)
    ]
    laid = lay(blocks, needles, spot.length - len(tokens.bos))
    examples = [ask(name, value) for name, value in list(zip(names, values, strict=True))[1 : 1 + EXAMPLES]]
    question = ask(names[0], "")
    shift = len(tokens.bos)
    turn = Turn(
        prompt=tokens.join("\n\n", "\n".join([*examples, question])),
        scoring=Exact((values[0],), "first"),
        max_new_tokens=14,
        stop=tokens.encode("\n"),
        label="assert",
    )
    return _item(
        spot,
        tokens.bos + laid.ids,
        turn,
        path,
        (laid.spans[0][0] + shift, laid.spans[0][1] + shift),
        values[0],
        spot.depth,
    )


def _item(spot: Spot, context: Ids, turn: Turn, path: Path, fact: tuple[int, int], gold: str, depth: float) -> Item:
    shown = path.relative_to(library_root()).as_posix()
    return Item(
        suite=Code.name,
        task=spot.task,
        index=spot.index,
        length=spot.length,
        context=context,
        turns=(turn,),
        cluster=shown,
        depth=depth,
        facts=(fact,),
        meta={"gold": gold, "file": shown, "source": fingerprint()},
    )


Shape = tuple[list[str], list[str], Callable[[str, str], str], Callable[[str, str], str]]


def _constant(spot: Spot) -> Shape:
    names = _names(spot, "UPPER")
    return names, words.numbers(spot.rng, len(names), 5), "{} = {}\n".format, lambda n, v: f"assert {n} == {v}".rstrip()


def _label(spot: Spot) -> Shape:
    names = _names(spot, "UPPER")
    values = ["-".join(pair) for pair in words.pairs(spot.rng, len(names))]
    return names, values, '{} = "{}"\n'.format, lambda n, v: f'assert {n} == "{v}' + ('"' if v else "")


def _signature(spot: Spot) -> Shape:
    names = _names(spot, "snake")
    values = [", ".join(spot.rng.sample(words.THINGS, 3)) for _ in names]
    return (
        names,
        values,
        "def {}({}):\n    raise NotImplementedError\n".format,
        lambda n, v: f"def {n}({v}" + ("):" if v else ""),
    )


SHAPES: dict[str, Callable[[Spot], Shape]] = {"constant": _constant, "label": _label, "signature": _signature}


def _names(spot: Spot, style: str) -> list[str]:
    found: list[str] = []
    while len(found) < DEFINITIONS:
        name = in_style(style, spot.rng)
        if name not in found:
            found.append(name)
    return found


def _code(tokens: Tokens, spot: Spot) -> tuple[Path, list[Ids]]:
    """A file with enough short statements, renamed, in blocks of ids that begin a line; a window of it at random."""
    files = [path for path in library_files() if path.stat().st_size > 5 * spot.length]
    if not files:
        raise ValueError(f"suite lengths: no file has {spot.length} tokens of code; ask for less")
    for path in spot.rng.sample(files, len(files)):
        if sum(map(len, _blocks(path))) < 4 * spot.length:
            continue
        ids = [tokens.encode("\n" + block) for block in _short(rename(path.read_text("utf-8"), spot.rng).source)]
        ends = [end for end in range(1, len(ids) + 1) if sum(map(len, ids[:end])) >= spot.length]
        if ends:
            return path, ids[: spot.rng.choice(ends)]
    raise ValueError(f"suite lengths: no file has {spot.length} tokens of short statements; ask for less")


@cache
def _blocks(path: Path) -> tuple[str, ...]:
    return tuple(_short(path.read_text("utf-8"))) if parse(path) else ()


def _short(source: str) -> list[str]:
    """Top-level statements with the comments above them, but for very long ones."""
    lines = source.split("\n")
    found, done = [], 0
    for node in ast.parse(source).body:
        end = node.end_lineno or 0
        if end > done:
            found.append("\n".join(lines[done:end]).strip("\n"))
            done = end
    return [block for block in found if len(block) <= MAX_BLOCK]


def _completion(tokens: Tokens, spot: Spot) -> Item:
    files = [path for path in library_files() if path.stat().st_size > 5 * spot.length]
    for path in spot.rng.sample(files, len(files)):
        if parse(path) is None:
            continue
        found = sites(tokens, rename(path.read_text("utf-8"), spot.rng), spot.length, TAIL, spot.rng, 3)
        if not found:
            continue
        site = min(found, key=lambda one: abs(one.depth - spot.depth))
        order = spot.rng.sample(range(4), 4)
        turn = Turn(
            prompt=site.prompt,
            scoring=Choice(tuple(site.candidates[rank] for rank in order), order.index(0)),
            label="completion",
        )
        depth = min(spot.depths, key=lambda depth: abs(site.depth - depth))
        return _item(spot, site.context, turn, path, site.fact, site.name, depth)
    raise ValueError(f"suite lengths: no file uses a name again over {spot.length // 4} tokens or more; ask for less")
