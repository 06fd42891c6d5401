"""Long-range identifier completion by likelihood: where a renamed file itself uses a name it has not used for long.

After RepoBench's and LongCodeArena's completion tasks in spirit; the distractors are names of the same style that the
file never uses, so that only a reader who still has the earlier occurrence can tell.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from itertools import pairwise

from kvgate.evals.data.items import Ids
from kvgate.evals.data.tokens import Tokens
from kvgate.evals.suites.code.renaming import Renamed, in_style

CHARS_PER_TOKEN = 3.0  # of code; only preselects, the ids decide


@dataclass(frozen=True)
class Site:
    """A use in a renamed file, cut into ids.

    Attributes:
        context: exactly the asked-for length, BOS included; the code up to ``prompt``.
        prompt: the code between the context and the identifier.
        candidates: the identifier in use, then names of the same style that the file does not have.
        fact: (start, end) of the line of its latest occurrence, within the context.
        depth: where that line starts, 0 to 1.
    """

    context: Ids
    prompt: Ids
    candidates: tuple[Ids, ...]
    name: str
    fact: tuple[int, int]
    depth: float


def sites(tokens: Tokens, renamed: Renamed, length: int, tail: int, rng: random.Random, distractors: int) -> list[Site]:
    """At most four usable sites of the file, in random order.

    A site is usable when the latest occurrence before it stands inside the context and at least a quarter of ``length``
    before the use.
    """
    found: list[Site] = []
    spots = [(name, gap) for name in sorted(renamed.names.values()) for gap in _gaps(renamed.source, name, length)]
    for name, (before, use) in rng.sample(spots, len(spots)):
        site = _site(tokens, renamed, name, before, use, length, tail, rng, distractors)
        if site is not None:
            found.append(site)
        if len(found) == 4:
            break
    return found


def _gaps(source: str, name: str, length: int) -> list[tuple[int, int]]:
    """(latest occurrence, use) in characters, far enough apart and not too far."""
    places = [found.start() for found in re.finditer(rf"(?<![\w.]){re.escape(name)}\b", source)]
    return [
        (before, use)
        for before, use in pairwise(places)
        if length / 4 * CHARS_PER_TOKEN < use - before < length * 4 and not _is_definition(source, use)
    ]


def _is_definition(source: str, place: int) -> bool:
    line = source[source.rfind("\n", 0, place) + 1 : place]
    return line in ("", "def ", "class ", "async def ") or "#" in line


def _site(
    tokens: Tokens,
    renamed: Renamed,
    name: str,
    before: int,
    use: int,
    length: int,
    tail: int,
    rng: random.Random,
    distractors: int,
) -> Site | None:
    source = renamed.source
    lead = " " if source[use - 1] == " " else ""
    end = use - len(lead)
    line, after = source.rfind("\n", 0, before), source.find("\n", before)
    far = tokens.encode(source[max(0, line - 6 * length) : line]) if line > 0 else ()
    seen, rest = tokens.encode(source[max(line, 0) : after]), tokens.encode(source[after:end])
    if not length / 4 <= len(rest) - tail or len(seen) + len(rest) - tail > length - len(tokens.bos):
        return None
    whole = (far + seen + rest)[:-tail][-(length - len(tokens.bos)) :]
    context = tokens.bos + whole
    if len(context) < length:
        return None
    start = length - (len(rest) - tail) - len(seen)
    names = [name]
    while len(names) <= distractors:
        other = in_style(name, rng)
        if other not in source and other not in names:
            names.append(other)
    return Site(
        context=context,
        prompt=rest[-tail:],
        candidates=tuple(tokens.encode(lead + other) for other in names),
        name=name,
        fact=(start, start + len(seen)),
        depth=start / length,
    )
