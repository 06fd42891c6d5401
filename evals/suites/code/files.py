"""Real code for the code suite: which files, their top-level statements, and fresh names."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvgate.evals.data.corpus import fingerprint, library_files, library_root, parse, python_files
from kvgate.evals.data.items import Ids
from kvgate.evals.data.tokens import Tokens
from kvgate.evals.suites.base import GroupSpec
from kvgate.evals.suites.code.renaming import Renamed, rename

HANDY = 40_000  # bytes; renaming a file costs time in proportion to its size, and a small part of it is used
MAX_BLOCK = 1200  # characters; longer statements leave too few borders


@dataclass(frozen=True)
class Shelf:
    """Where code comes from: ``files`` under ``root``; ``source`` names it in records."""

    root: Path
    files: tuple[Path, ...]
    source: str

    def shown(self, path: Path) -> str:
        """The file's name in records: relative, so that it is the same on every machine."""
        return path.relative_to(self.root).as_posix()


def shelf(options: dict[str, Any]) -> Shelf:
    """The standard library, or the folder or installed package that the options name. ValueError if it is not there."""
    folder, package = options["folder"], options["package"]
    if folder and package:
        raise ValueError("suite code: options folder and package exclude each other; name one")
    if folder:
        root = Path(folder)
        return Shelf(root, python_files(root), root.name)
    if package:
        root = _package_root(package)
        return Shelf(root, python_files(root), package)
    return Shelf(library_root(), library_files(), fingerprint())


def _package_root(package: str) -> Path:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"code package {package!r} is not installed or is a single module; name another, or a folder")
    return Path(next(iter(spec.submodule_search_locations)))


def _shuffled(group: GroupSpec, books: Shelf, length: int) -> list[Path]:
    """Files large enough for ``length`` tokens in random order; very large ones only if there are no others."""
    large_enough = [path for path in books.files if path.stat().st_size > 4 * length]
    handy = [path for path in large_enough if path.stat().st_size < max(HANDY, 16 * length)] or large_enough
    return group.rng.sample(handy, len(handy))


def renamed_files(group: GroupSpec, books: Shelf, length: int) -> Iterator[tuple[Path, Renamed]]:
    """Files large enough for ``length`` tokens, in random order, each with fresh names of this group's own."""
    for path in _shuffled(group, books, length):
        if parse(path) is not None:
            yield path, rename(path.read_text("utf-8"), group.rng)


def blocks(tokens: Tokens, group: GroupSpec, books: Shelf, length: int) -> Iterator[tuple[Path, list[Ids]]]:
    """Files with enough short statements, as pieces of ids that each begin a line; a window at random."""
    for path in _shuffled(group, books, length):
        if sum(map(len, _statements_of(path))) < 4 * length:
            continue
        renamed = rename(path.read_text("utf-8"), group.rng)
        ids = [tokens.encode("\n" + block) for block in statements(renamed.source)]
        ends = [end for end in range(1, len(ids) + 1) if sum(map(len, ids[:end])) >= length]
        if ends:
            yield path, ids[: group.rng.choice(ends)]


@cache
def _statements_of(path: Path) -> tuple[str, ...]:
    return tuple(statements(path.read_text("utf-8"))) if parse(path) else ()


def statements(source: str) -> list[str]:
    """Top-level statements with the comments above them, but for very long ones."""
    lines = source.split("\n")
    found, done = [], 0
    for node in ast.parse(source).body:
        end = node.end_lineno or 0
        if end > done:
            found.append("\n".join(lines[done:end]).strip("\n"))
            done = end
    return [block for block in found if len(block) <= MAX_BLOCK]
