"""Real text and code that is on every machine with Python: topics of ``pydoc``, docstrings, the standard library.

No network. The text depends on the Python release, so records carry :func:`fingerprint`.
"""

from __future__ import annotations

import ast
import platform
import random
import re
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kvgate.evals.data.items import Ids
from kvgate.evals.data.tokens import Tokens

# Not prose or not code that anybody wrote by hand: tests, generated tables, bundled packages.
SKIPPED = frozenset(
    {"test", "tests", "idlelib_test", "idlelib", "lib2to3", "turtledemo", "encodings", "ensurepip", "site-packages"}
    | {"dist-packages", "pydoc_data", "__phello__", "config", "__pycache__", "_vendor", "msilib", "distutils"}
)
_SENTENCE_END = re.compile(r"(?<=[.!?]) +(?=[A-Z\"(])")
# A raw or plain docstring after nothing but comments; parsing every file for it would take seconds.
_DOCSTRING = re.compile(r"(?:\s*#[^\n]*\n)*\s*[rR]?(?P<quote>\"{3}|'{3})(?P<text>.*?)(?P=quote)", re.DOTALL)
MIN_WORDS, MAX_CHARS = 12, 900


@dataclass(frozen=True)
class Passage:
    """A titled run of paragraphs, each a tuple of sentences."""

    title: str
    paragraphs: tuple[tuple[str, ...], ...]


def fingerprint() -> str:
    """Which release the text and code come from."""
    return f"python {platform.python_version()}"


def library_root() -> Path:
    """Folder of the standard library."""
    return Path(sysconfig.get_path("stdlib"))


@cache
def library_files() -> tuple[Path, ...]:
    """Python files of the standard library, sorted by path."""
    return python_files(library_root())


def python_files(root: Path) -> tuple[Path, ...]:
    """Hand-written Python files under a folder, sorted. ValueError if the folder is not there or has none."""
    if not root.is_dir():
        raise ValueError(f"code folder {root} is not a folder; name one that holds .py files")
    found = tuple(
        path for path in sorted(root.rglob("*.py")) if not SKIPPED.intersection(path.relative_to(root).parts[:-1])
    )
    if not found:
        raise ValueError(f"code folder {root} holds no .py files; name one that does")
    return found


@cache
def passages() -> tuple[Passage, ...]:
    """Prose with at least three usable paragraphs: language reference topics, then module docstrings."""
    made = [Passage(title, _paragraphs(text)) for title, text in [*_topics(), *_docstrings()]]
    return tuple(passage for passage in made if len(passage.paragraphs) >= 3)


def _topics() -> list[tuple[str, str]]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out
        return []
    return sorted(topics.items())


def _docstrings() -> Iterator[tuple[str, str]]:
    root = library_root()
    for path in library_files():
        found = _DOCSTRING.match(path.read_text("utf-8", errors="replace"))
        if found and len(found["text"]) > 1500:
            yield path.relative_to(root).as_posix(), found["text"]


def parse(path: Path) -> ast.Module | None:
    """The file's syntax tree, or None for what this Python cannot read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            return ast.parse(path.read_text("utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return None


def _paragraphs(text: str) -> tuple[tuple[str, ...], ...]:
    found = []
    for block in re.split(r"\n\s*\n", text):
        line = " ".join(block.split())
        prose = line[:1].isupper() and line.endswith(".") and "::" not in line and line.isascii()
        if prose and len(line.split()) >= MIN_WORDS and len(line) <= MAX_CHARS:
            found.append(tuple(_SENTENCE_END.split(line)))
    return tuple(found)


def prose(tokens: Tokens, rng: random.Random, room: int) -> list[Ids]:
    """At least ``room`` token ids of text, as sentences; passages in an order of their own for every ``rng``."""
    pieces: list[Ids] = []
    size = 0
    order = rng.sample(passages(), len(passages()))
    while size < room:
        passage = order.pop() if order else rng.choice(passages())
        start = rng.randrange(len(passage.paragraphs))
        for paragraph in passage.paragraphs[start : start + 4]:
            for number, sentence in enumerate(paragraph):
                pieces.append(tokens.encode((" " if number else "\n") + sentence))
                size += len(pieces[-1])
    return pieces


@dataclass(frozen=True)
class Laid:
    """Filler with needles in it: ``ids``, and each needle's (start, end) in the order they were given."""

    ids: Ids
    spans: tuple[tuple[int, int], ...]


def lay(pieces: Sequence[Ids], needles: Sequence[tuple[float, Ids]], room: int) -> Laid:
    """Exactly ``room`` ids: needles whole, between pieces, at the nearest border to their depth; filler cut in front.

    Args:
        pieces: filler in reading order; the last ones are used, and the first of those is cut where it must be.
        needles: (depth, ids); several at one border keep their order.
        room: ids to fill. ValueError if the needles alone do not fit, or the filler is too short.
    """
    space = room - sum(len(ids) for _, ids in needles)
    if space < 0:
        raise ValueError(
            f"suite lengths: the needles need {room - space} tokens and the context has room for {room}; ask for more"
        )
    used = _last(pieces, space)
    borders = [0]
    for piece in used:
        borders.append(borders[-1] + len(piece))
    filler = [token for piece in used for token in piece]
    placed = sorted(
        (min(borders, key=lambda border: abs(border - depth * space)), rank) for rank, (depth, _) in enumerate(needles)
    )
    ids: list[int] = []
    spans: dict[int, tuple[int, int]] = {}
    done = 0
    for border, rank in placed:
        ids += filler[done:border]
        spans[rank] = (len(ids), len(ids) + len(needles[rank][1]))
        ids += needles[rank][1]
        done = border
    ids += filler[done:]
    assert len(ids) == room, "a laid context misses its length"
    return Laid(tuple(ids), tuple(spans[rank] for rank in range(len(needles))))


def _last(pieces: Sequence[Ids], space: int) -> list[Ids]:
    used: list[Ids] = []
    for piece in reversed(pieces):
        if space <= 0:
            break
        used.append(piece[-space:])
        space -= len(used[-1])
    if space > 0:
        raise ValueError(f"suite sources: {space} tokens of filler are missing; ask for a shorter length")
    return used[::-1]
