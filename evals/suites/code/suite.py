"""Use late what was defined early, in real code with fresh names.

Files of the standard library, or of a folder or package the user names, are renamed (see renaming.py)
and cut at top-level statements. Definitions of one shape are set between the statements; one of them is asked for after
the code ends, in an assertion as a test file would have it, after assertions about others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import ClassVar

from kvgate.evals.data.corpus import lay
from kvgate.evals.data.items import Choice, Exact, Ids, Item, Turn
from kvgate.evals.data.tokens import Tokens
from kvgate.evals.suites import words
from kvgate.evals.suites.base import Generated, GroupSpec
from kvgate.evals.suites.code.completion import sites
from kvgate.evals.suites.code.files import blocks, renamed_files, shelf
from kvgate.evals.suites.code.renaming import styled

DEFINITIONS, EXAMPLES = 5, 3
PARAMETERS = 3
TAIL = 24  # tokens of code between the end of the context and the completed identifier


class Code(Generated):
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
        "imports": "two modules one after the other; a constant of one is asserted in a third that imports it",
    }
    optional = frozenset({"signature"})  # the embedded model mixes parameters of several functions up
    loose_depths = frozenset({"completion"})
    options: ClassVar = {"folder": "", "package": ""}

    @classmethod
    def has_source(cls, task: str) -> bool:
        """Clusters are files."""
        return True

    def make(self, tokens: Tokens, group: GroupSpec) -> list[Item]:
        """One item: code of exactly ``group.length`` ids and one question. Cluster: the file."""
        return [MAKERS[group.task](tokens, group)]


@dataclass(frozen=True)
class Shape:
    """Definitions of one form and the assertions about them. The asked-for one is the first."""

    names: list[str]
    values: list[str]
    define: Callable[[str, str], str]
    assertion: Callable[[str, str], str]

    def examples(self) -> list[str]:
        """Whole assertions about definitions that are not asked for."""
        pairs = list(zip(self.names, self.values, strict=True))
        return [self.assertion(name, value) for name, value in pairs[1 : 1 + EXAMPLES]]


def _constants(group: GroupSpec) -> Shape:
    return Shape(
        _names(group, "CONSTANT"),
        words.numbers(group.rng, DEFINITIONS),
        "{} = {}\n".format,
        lambda name, value: f"assert {name} == {value}".rstrip(),
    )


def _labels(group: GroupSpec) -> Shape:
    return Shape(
        _names(group, "CONSTANT"),
        ["-".join(pair) for pair in words.pairs(group.rng, DEFINITIONS)],
        '{} = "{}"\n'.format,
        lambda name, value: f'assert {name} == "{value}' + ('"' if value else ""),
    )


def _signatures(group: GroupSpec) -> Shape:
    pool = group.rng.sample(words.THINGS, PARAMETERS * DEFINITIONS)
    return Shape(
        _names(group, "function"),
        [", ".join(pool[start : start + PARAMETERS]) for start in range(0, len(pool), PARAMETERS)],
        "def {}({}):\n    raise NotImplementedError\n".format,
        lambda name, value: f"def {name}({value}" + ("):" if value else ""),
    )


def _names(group: GroupSpec, style: str) -> list[str]:
    """Names that share no word, so that one is not taken for another by its beginning."""
    return [styled(pair, style) for pair in words.pairs(group.rng, DEFINITIONS)]


def _asserted(shape_of: Callable[[GroupSpec], Shape]) -> Callable[[Tokens, GroupSpec], Item]:
    def make(tokens: Tokens, group: GroupSpec) -> Item:
        shape = shape_of(group)
        books = shelf(dict(group.options))
        for path, pieces in blocks(tokens, group, books, group.length):
            laid = lay(pieces, _definitions(tokens, group, shape), group.length - len(tokens.bos))
            prompt = "\n".join([*shape.examples(), shape.assertion(shape.names[0], "")])
            turn = _turn(tokens, prompt, shape.values[0])
            context = tokens.bos + laid.ids
            return _item(group, context, turn, (books.shown(path), books.source), _shifted(tokens, laid.spans[0]))
        raise ValueError(f"suite lengths: no file has {group.length} tokens of short statements; ask for less")

    return make


def _definitions(tokens: Tokens, group: GroupSpec, shape: Shape) -> list[tuple[float, Ids]]:
    depths = [group.depth, *(group.rng.random() for _ in shape.names[1:])]
    lines = [tokens.encode("\n" + shape.define(*pair)) for pair in zip(shape.names, shape.values, strict=True)]
    return list(zip(depths, lines, strict=True))


def _imports(tokens: Tokens, group: GroupSpec) -> Item:
    """A module's header stands in the code as a comment; which module a constant is in follows from its place."""
    shape, modules = _constants(group), [styled(pair, "module") for pair in words.pairs(group.rng, 2)]
    books = shelf(dict(group.options))
    found = list(islice(blocks(tokens, group, books, group.length * 2 // 3), 2))
    if len(found) < 2:
        raise ValueError(f"suite lengths: no two files have {group.length} tokens of short statements; ask for less")
    (path, first), (_, second) = found
    headers = [(depth, tokens.encode(f"\n# {name}.py\n")) for depth, name in zip((0.0, 0.5), modules, strict=True)]
    room = group.length - len(tokens.bos)
    # Cut both to a half, so that the second module begins in the middle.
    half = [_tail(first, room // 2), _tail(second, room - room // 2)]
    laid = lay([*half[0], *half[1]], [*headers, *_definitions(tokens, group, shape)], room)
    owners = [modules[start >= laid.spans[1][0]] for start, _ in laid.spans[2:]]
    full = replace(shape, names=[f"{owner}.{name}" for owner, name in zip(owners, shape.names, strict=True)])
    lines = [f"import {', '.join(modules)}", "", *full.examples(), full.assertion(full.names[0], "")]
    turn = _turn(tokens, "# test.py\n" + "\n".join(lines), shape.values[0])
    context = tokens.bos + laid.ids
    return _item(group, context, turn, (books.shown(path), books.source), _shifted(tokens, laid.spans[2]))


def _tail(pieces: list[Ids], room: int) -> list[Ids]:
    """The last pieces that fill ``room`` ids, the first of them cut."""
    kept: list[Ids] = []
    while room > 0:
        kept.append(pieces[len(pieces) - 1 - len(kept)][-room:])
        room -= len(kept[-1])
    return kept[::-1]


def _completion(tokens: Tokens, group: GroupSpec) -> Item:
    books = shelf(dict(group.options))
    for path, renamed in renamed_files(group, books, group.length):
        found = sites(tokens, renamed, group.length, TAIL, group.rng, 3)
        if not found:
            continue
        site = min(found, key=lambda one: abs(one.depth - group.depth))
        order = group.rng.sample(range(4), 4)
        choice = Choice(tuple(site.candidates[rank] for rank in order), order.index(0))
        turn = Turn(prompt=site.prompt, scoring=choice, label="completion")
        near = replace(group, depth=min(group.depths, key=lambda depth: abs(site.depth - depth)))
        return _item(near, site.context, turn, (books.shown(path), books.source), site.fact, site.name)
    raise ValueError(f"suite lengths: no file uses a name again over {group.length // 4} tokens or more; ask for less")


def _turn(tokens: Tokens, prompt: str, gold: str) -> Turn:
    return Turn(
        prompt=tokens.join("\n\n", prompt),
        scoring=Exact((gold,), "first"),
        max_new_tokens=14,
        stop=tokens.line_ends,
        label="assert",
    )


def _shifted(tokens: Tokens, span: tuple[int, int]) -> tuple[int, int]:
    return span[0] + len(tokens.bos), span[1] + len(tokens.bos)


def _item(
    group: GroupSpec, context: Ids, turn: Turn, origin: tuple[str, str], fact: tuple[int, int], gold: str | None = None
) -> Item:
    file, source = origin
    return Item(
        suite=Code.name,
        task=group.task,
        index=group.index,
        length=group.length,
        context=context,
        turns=(turn,),
        cluster=file,
        depth=group.depth,
        facts=(fact,),
        meta={"gold": gold or _gold(turn), "file": file, "source": source},
    )


def _gold(turn: Turn) -> str:
    assert isinstance(turn.scoring, Exact)
    return turn.scoring.accept[0]


MAKERS: dict[str, Callable[[Tokens, GroupSpec], Item]] = {
    "constant": _asserted(_constants),
    "label": _asserted(_labels),
    "signature": _asserted(_signatures),
    "completion": _completion,
    "imports": _imports,
}
