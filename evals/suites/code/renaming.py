"""Fresh names for what a Python file defines at its top level, checked against the syntax tree.

Without it a model answers from memory of the standard library and eviction costs nothing.
"""

from __future__ import annotations

import ast
import io
import random
import tokenize
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from kvgate.evals.suites import words


@dataclass(frozen=True)
class Renamed:
    """Source with fresh names. ``names``: old -> new. Definitions are at column 0 of ``source``."""

    source: str
    names: Mapping[str, str]


def rename(source: str, rng: random.Random) -> Renamed:
    """``source`` with every safely renamable top-level name replaced.

    A name is safe when each of its tokens is a plain name or the name of a top-level definition: not an argument, not a
    keyword argument, not imported, not declared global, not hidden inside an f-string. Attributes keep their names.
    Raises SyntaxError for unreadable source; an AssertionError would mean that the renamed file means something else.
    """
    tree = ast.parse(source)
    places = _places(source, tree)
    spoken = {token for token, _ in places.all_names}
    fresh: dict[str, str] = {}
    for name in sorted(places.safe):
        fresh[name] = _fresh(name, rng, spoken)
    changed = _replace(source, [place for place in places.uses if place[0] in fresh], fresh)
    assert ast.dump(ast.parse(changed)) == ast.dump(_Renamer(fresh).visit(tree)), "renaming changed more than names"
    return Renamed(changed, fresh)


@dataclass(frozen=True)
class _Places:
    all_names: set[tuple[str, tuple[int, int]]]
    uses: list[tuple[str, tuple[int, int]]]
    safe: set[str]


def _places(source: str, tree: ast.Module) -> _Places:
    plain = Counter(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    defined = _defined(tree)
    plain.update(name for name, kind in defined.items() if kind == "definition")
    counts: Counter[str] = Counter()
    uses: list[tuple[str, tuple[int, int]]] = []
    everything: set[tuple[str, tuple[int, int]]] = set()
    before = ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            everything.add((token.string, token.start))
            if before != "." and token.string in defined:
                counts[token.string] += 1
                uses.append((token.string, token.start))
        before = token.string
    safe = {name for name in defined if counts[name] == plain[name] and not name.startswith("__")}
    return _Places(everything, uses, safe - _barred(tree))


def _defined(tree: ast.Module) -> dict[str, str]:
    """Names bound once at the top level: name -> "definition" or "constant"."""
    found: list[tuple[str, str]] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.append((node.name, "definition"))
        elif isinstance(node, ast.Assign):
            found.extend((target.id, "constant") for target in node.targets if isinstance(target, ast.Name))
    times = Counter(name for name, _ in found)
    return {name: kind for name, kind in found if times[name] == 1}


def _barred(tree: ast.Module) -> set[str]:
    """Names that something other than a plain use may refer to."""
    barred: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Global | ast.Nonlocal):
            barred.update(node.names)
        elif isinstance(node, ast.alias):
            barred.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.arg | ast.keyword):
            barred.add(node.arg or "")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node not in tree.body:
            barred.add(node.name)
    return barred


def _fresh(old: str, rng: random.Random, taken: set[str]) -> str:
    """A name of the same style that occurs nowhere in the file."""
    while True:
        new = in_style(old, rng)
        if new not in taken:
            taken.add(new)
            return new


def in_style(old: str, rng: random.Random) -> str:
    """Two plain words in the style of ``old``: UPPER_CASE, CamelCase or snake_case, leading underscores kept."""
    return styled((rng.choice(words.QUALITIES), rng.choice(words.THINGS)), old)


def styled(pair: tuple[str, str], like: str) -> str:
    """The two words in the style of ``like``."""
    first, second = pair
    bare = like.lstrip("_")
    lead = "_" * (len(like) - len(bare))
    if bare.isupper():
        return f"{lead}{first}_{second}".upper()
    if bare[:1].isupper():
        return f"{lead}{first.title()}{second.title()}"
    return f"{lead}{first}_{second}"


def _replace(source: str, places: list[tuple[str, tuple[int, int]]], fresh: Mapping[str, str]) -> str:
    lines = source.split("\n")
    for name, (line, column) in sorted(places, key=lambda place: place[1], reverse=True):
        text = lines[line - 1]
        assert text[column : column + len(name)] == name, "a token is not where tokenize says"
        lines[line - 1] = text[:column] + fresh[name] + text[column + len(name) :]
    return "\n".join(lines)


class _Renamer(ast.NodeTransformer):
    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names

    def visit_Name(self, node: ast.Name) -> ast.AST:
        node.id = self.names.get(node.id, node.id)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.name = self.names.get(node.name, node.name)
        return self.generic_visit(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        node.name = self.names.get(node.name, node.name)
        return self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.name = self.names.get(node.name, node.name)
        return self.generic_visit(node)
