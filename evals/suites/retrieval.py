"""Find what was said: one needle, one of several, one of many keys, the last of several assignments.

After RULER (Hsieh et al. 2024, arXiv:2404.06654, section 3 and appendix B: single and multi-key needles, variable
tracking) and key-value retrieval (Liu et al. 2023, arXiv:2307.03172, section 3). Own generators: haystacks are varied
real prose, never one fixed prefix, and every number is drawn for its item.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from kvgate.evals.chat import Tokens
from kvgate.evals.items import Exact, Ids, Item, Turn
from kvgate.evals.sources import Laid, fingerprint, lay, prose
from kvgate.evals.suites import words
from kvgate.evals.suites.base import Spot, Suite

INTRO = "Read this text. It holds numbers that you will be asked about.\n"
NEEDLE = "The magic number of the {} is"
NEEDLES, KEYS = 4, 6


class Retrieval(Suite):
    """Seven-digit numbers in prose."""

    name = "retrieval"
    measures = "Whether a fact stated once in a long text can still be found when the question comes after eviction."
    why_eviction_hurts = (
        "The question is not known when tokens are dropped. What leaves the cache with the needle's tokens is gone; a "
        "policy that keeps recent or popular tokens has no reason to keep a number that nothing refers to yet."
    )
    tasks: ClassVar = {
        "single": "one needle in prose",
        "multi_key": f"{NEEDLES} needles of one form; one is asked for",
        "key_value": f"a list of {KEYS} keys and numbers in prose; one is asked for",
        "assignment": "a counter is set and later changed, another is changed too; its last value is asked for",
    }

    def make(self, tokens: Tokens, spot: Spot) -> list[Item]:
        """One item: a context of exactly ``spot.length`` ids and one question."""
        return [MAKERS[spot.task](tokens, spot)]


def haystack(tokens: Tokens, spot: Spot, told: Sequence[tuple[float, str]]) -> tuple[Ids, Laid]:
    """Template and introduction, then prose with the told lines at their depths, to exactly ``spot.length`` ids."""
    head = tokens.join(tokens.chat.start(), INTRO)
    room = spot.length - len(head)
    needles = [(depth, tokens.encode("\n" + line)) for depth, line in told]
    return head, lay(prose(tokens, spot.rng, max(room, 0)), needles, room)


def ask(tokens: Tokens, question: str, prefix: str, gold: str, label: str = "question") -> Turn:
    """The question, and the beginning of the answer that the model is to finish with a number."""
    return Turn(
        prompt=tokens.join("\n\n", question, tokens.chat.speak, prefix),
        scoring=Exact((gold,), "first"),
        max_new_tokens=10,
        stop=tokens.join("\n", "."),
        label=label,
    )


def finished(spot: Spot, head: Ids, laid: Laid, turn: Turn, facts: Sequence[int]) -> Item:
    """The item; ``facts`` says which of the told lines hold the evidence."""
    assert isinstance(turn.scoring, Exact)
    return Item(
        suite=Retrieval.name,
        task=spot.task,
        index=spot.index,
        length=spot.length,
        context=head + laid.ids,
        turns=(turn,),
        cluster=f"{spot.task}-{spot.length}-{spot.index}",
        depth=spot.depth,
        facts=tuple((laid.spans[fact][0] + len(head), laid.spans[fact][1] + len(head)) for fact in facts),
        meta={"gold": turn.scoring.accept[0], "source": fingerprint()},
    )


def _needles(tokens: Tokens, spot: Spot, count: int) -> Item:
    names = [" ".join(pair) for pair in words.pairs(spot.rng, count)]
    values = words.numbers(spot.rng, count)
    depths = [spot.depth, *(spot.rng.random() for _ in range(count - 1))]
    lines = [f"{NEEDLE.format(name)} {value}." for name, value in zip(names, values, strict=True)]
    head, laid = haystack(tokens, spot, list(zip(depths, lines, strict=True)))
    turn = ask(tokens, f"What is the magic number of the {names[0]}?", NEEDLE.format(names[0]), values[0])
    return finished(spot, head, laid, turn, [0])


def _single(tokens: Tokens, spot: Spot) -> Item:
    return _needles(tokens, spot, 1)


def _multi_key(tokens: Tokens, spot: Spot) -> Item:
    return _needles(tokens, spot, NEEDLES)


def _key_value(tokens: Tokens, spot: Spot) -> Item:
    """The list is one block at the item's depth. Another of its lines comes before the answer, to show the form."""
    keys = [" ".join(pair) for pair in words.pairs(spot.rng, KEYS)]
    lines = [f"{key} = {value}" for key, value in zip(keys, words.numbers(spot.rng, KEYS), strict=True)]
    head, laid = haystack(tokens, spot, [(spot.depth, line) for line in lines])
    asked, shown = spot.rng.sample(range(KEYS), 2)
    before, _, value = lines[asked].rpartition(" ")
    turn = ask(tokens, f"Which number belongs to {keys[asked]}?", f"{lines[shown]}\n{before}", value)
    return finished(spot, head, laid, turn, [asked])


def _assignment(tokens: Tokens, spot: Spot) -> Item:
    """A counter is set and later changed, and another is changed between; the change stands at the item's depth."""
    names = [" ".join(pair) for pair in words.pairs(spot.rng, 2)]
    first, other, last = words.numbers(spot.rng, 3)
    start, change = "The counter {} is set to", "The counter {} is now changed to"
    told = [
        (spot.depth / 3, f"{start.format(names[0])} {first}."),
        (spot.depth * 2 / 3, f"{change.format(names[1])} {other}."),
        (spot.depth, f"{change.format(names[0])} {last}."),
    ]
    head, laid = haystack(tokens, spot, told)
    turn = ask(tokens, f"What is the counter {names[0]} now?", change.format(names[0]), last)
    return finished(spot, head, laid, turn, [2])


MAKERS: dict[str, Callable[[Tokens, Spot], Item]] = {
    "single": _single,
    "multi_key": _multi_key,
    "key_value": _key_value,
    "assignment": _assignment,
}
