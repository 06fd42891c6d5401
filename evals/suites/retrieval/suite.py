"""Find what was said: one needle, one of several, one of many keys, the last of several assignments.

After RULER (Hsieh et al. 2024, arXiv:2404.06654, section 3 and appendix B: single and multi-key needles, variable
tracking) and key-value retrieval (Liu et al. 2023, arXiv:2307.03172, section 3). Own generators: haystacks are varied
real prose, never one fixed prefix, and every number is drawn for its item. A needle grid (length x depth) is this suite
with ``tasks: [single]`` and counts that are multiples of the number of depths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from kvgate.evals.data.items import Item
from kvgate.evals.data.tokens import Tokens
from kvgate.evals.suites import words
from kvgate.evals.suites.base import Generated, GroupSpec
from kvgate.evals.suites.retrieval import ruler
from kvgate.evals.suites.retrieval.needles import NEEDLE, SUITE, ask, finished, haystack, names

NEEDLES, KEYS = 3, 6


class Retrieval(Generated):
    """Numbers in prose."""

    name = SUITE
    measures = "Whether a fact stated once in a long text can still be found when the question comes after eviction."
    why_eviction_hurts = (
        "The question is not known when tokens are dropped. What leaves the cache with the needle's tokens is gone; a "
        "policy that keeps recent or popular tokens has no reason to keep a number that nothing refers to yet."
    )
    tasks: ClassVar = {
        "single": "one needle in prose",
        "multi_key": f"{NEEDLES} needles of one form; one is asked for",
        "key_value": f"a list of {KEYS} keys and numbers in prose; one is asked for",
        "assignment": "a counter is set and later changed, another is set between; the last value is asked for",
        "multi_value": f"one name with {ruler.VALUES} numbers; all are asked for",
        "multi_query": "four needles; two are asked for at once",
        "chain": f"variables set from variables; all {ruler.CHAIN} with one value are asked for",
        "common_words": "a word list; the three words that come up ten times as often are asked for",
        "frequent_words": "a word list by Zipf's law; the three most frequent are asked for",
    }
    # Several answers at once: more than the embedded model can do, and without a single place of evidence.
    optional = frozenset(ruler.MAKERS)

    def make(self, tokens: Tokens, group: GroupSpec) -> list[Item]:
        """One item: a context of exactly ``group.length`` ids and one question."""
        return [MAKERS[group.task](tokens, group)]


def _needles(tokens: Tokens, group: GroupSpec, count: int, where: str = "") -> Item:
    told, values = names(group, count), words.numbers(group.rng, count)
    depths = [group.depth, *(group.rng.random() for _ in range(count - 1))]
    lines = [f"{NEEDLE.format(name)} {value}." for name, value in zip(told, values, strict=True)]
    head, laid = haystack(tokens, group, list(zip(depths, lines, strict=True)))
    turn = ask(tokens, f"What is the magic number of the {told[0]}{where}?", NEEDLE.format(told[0]), values[0])
    return finished(group, head, laid, turn, [0])


def _single(tokens: Tokens, group: GroupSpec) -> Item:
    return _needles(tokens, group, 1)


def _multi_key(tokens: Tokens, group: GroupSpec) -> Item:
    # Told where to look, small models take another needle's number less often.
    return _needles(tokens, group, NEEDLES, " in the text")


def _key_value(tokens: Tokens, group: GroupSpec) -> Item:
    """The list is one block at the item's depth. Another of its lines comes before the answer, to show the form."""
    keys, values = names(group, KEYS), words.numbers(group.rng, KEYS)
    lines = [f"{key} = {value}" for key, value in zip(keys, values, strict=True)]
    head, laid = haystack(tokens, group, [(group.depth, line) for line in lines])
    asked, shown = group.rng.sample(range(KEYS), 2)
    question = f"Which number belongs to {keys[asked]}?"
    turn = ask(tokens, question, f"{lines[shown]}\n{keys[asked]} =", values[asked])
    return finished(group, head, laid, turn, [asked])


def _assignment(tokens: Tokens, group: GroupSpec) -> Item:
    """A counter is set and later changed, another is set between; the change stands at the item's depth."""
    mine, other = names(group, 2)
    first, between, last = words.numbers(group.rng, 3)
    start, change = "The counter {} is set to", "The counter {} is now changed to"
    told = [
        (group.depth / 3, f"{start.format(mine)} {first}."),
        (group.depth * 2 / 3, f"{start.format(other)} {between}."),
        (group.depth, f"{change.format(mine)} {last}."),
    ]
    head, laid = haystack(tokens, group, told)
    turn = ask(tokens, f"What is the counter {mine} now?", change.format(mine), last)
    return finished(group, head, laid, turn, [2])


MAKERS: dict[str, Callable[[Tokens, GroupSpec], Item]] = {
    "single": _single,
    "multi_key": _multi_key,
    "key_value": _key_value,
    "assignment": _assignment,
    **ruler.MAKERS,
}
