"""Answers of hundreds of tokens, so that what is tested is eviction while the answer is being written."""

from __future__ import annotations

from typing import ClassVar

from kvgate.evals.chat import Tokens
from kvgate.evals.items import Ids, Item, Listing, Turn
from kvgate.evals.sources import fingerprint, lay, prose
from kvgate.evals.suites import words
from kvgate.evals.suites.base import Generated, Spot

SHOWN = 3  # lines given as the beginning of the answer


class LongGeneration(Generated):
    """Counting, and reciting a list from the context."""

    name = "long_generation"
    measures = "Whether a list or a count is kept going over hundreds of new tokens, line by line at its place."
    why_eviction_hurts = (
        "The cache is evicted after every new token: where the answer stands, what was said and what comes next must "
        "survive in it. One lost line shifts all that follow; repetition and drifting length show it (evals/drift.py)."
    )
    tasks: ClassVar = {
        "count": "counting upwards from a number, one number a line",
        "recite": "repeating a numbered list that stands in the context",
    }
    options: ClassVar = {"new_tokens": 512}

    def make(self, tokens: Tokens, spot: Spot) -> list[Item]:
        """One item; the answer has about ``new_tokens`` tokens, reciting at most three fifths of the context."""
        wanted = _positive(spot.options["new_tokens"])
        if spot.task == "count":
            return [self._count(tokens, spot, _numbers(tokens, spot, wanted), wanted)]
        # The list stands in the context and must leave some of it to prose.
        wanted = min(wanted, spot.length * 3 // 5)
        return [self._recite(tokens, spot, _list(tokens, spot, wanted), wanted)]

    def _count(self, tokens: Tokens, spot: Spot, lines: list[str], cap: int) -> Item:
        head = tokens.join(tokens.chat.start(), "Read this text, then count.\n")
        laid = lay(prose(tokens, spot.rng, spot.length), [], spot.length - len(head))
        question = f"Count upwards from {lines[0]}, one number a line."
        return self._item(tokens, spot, head + laid.ids, (), question, lines, cap)

    def _recite(self, tokens: Tokens, spot: Spot, lines: list[str], cap: int) -> Item:
        head = tokens.join(tokens.chat.start(), "Read this text. It holds a numbered list.\n")
        listed = tokens.encode("\n" + "\n".join(lines) + "\n")
        laid = lay(prose(tokens, spot.rng, spot.length), [(spot.depth, listed)], spot.length - len(head))
        start, end = laid.spans[0]
        facts = ((start + len(head), end + len(head)),)
        return self._item(tokens, spot, head + laid.ids, facts, "Repeat the numbered list, all of it.", lines, cap)

    def _item(
        self,
        tokens: Tokens,
        spot: Spot,
        context: Ids,
        facts: tuple[tuple[int, int], ...],
        question: str,
        lines: list[str],
        cap: int,
    ) -> Item:
        begun = "\n".join(lines[:SHOWN]) + "\n"
        turn = Turn(
            prompt=tokens.join("\n\n", question, tokens.chat.speak, begun),
            scoring=Listing(tuple(lines[SHOWN:])),
            max_new_tokens=cap,
            label=spot.task,
        )
        return Item(
            suite=self.name,
            task=spot.task,
            index=spot.index,
            length=spot.length,
            context=context,
            turns=(turn,),
            cluster=f"{spot.task}-{spot.length}-{spot.index}",
            depth=spot.depth if facts else None,
            facts=facts,
            meta={"lines": str(len(lines)), "source": fingerprint()},
        )


def _positive(value: object) -> int:
    if not isinstance(value, int) or value < 32:
        raise ValueError(f"suite long_generation: new_tokens {value!r}; use a whole number from 32")
    return value


def _numbers(tokens: Tokens, spot: Spot, wanted: int) -> list[str]:
    first = spot.rng.randrange(1000, 9000)
    count = wanted // len(tokens.encode(f"{first}\n"))
    return [str(first + step) for step in range(count)]


def _list(tokens: Tokens, spot: Spot, wanted: int) -> list[str]:
    """Lines that together have just under ``wanted`` tokens."""
    lines: list[str] = []
    size = 0
    for quality, thing in words.pairs(spot.rng, wanted // 3):
        line = f"{len(lines) + 1}. {quality} {thing}"
        size += len(tokens.encode(line + "\n"))
        if size > wanted:
            break
        lines.append(line)
    return lines
