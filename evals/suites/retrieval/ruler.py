"""The RULER families that want several answers at once, for models that can give them.

Hsieh et al. 2024, arXiv:2404.06654, section 3: multi-value and multi-query needles, chains of variables, common words
(uniform noise, a few words repeated more often) and frequent words (Zipf's law). Scored by recall, as RULER does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from kvgate.evals.data.corpus import fingerprint, lay
from kvgate.evals.data.items import Item, Recall, Turn
from kvgate.evals.data.tokens import Tokens
from kvgate.evals.suites import words
from kvgate.evals.suites.base import GroupSpec
from kvgate.evals.suites.retrieval.needles import NEEDLE, SUITE, finished, haystack, names

VALUES, CHAIN, COMMON = 3, 3, 3
# RULER's defaults: a common word stands 30 times where an uncommon one stands 3 times (appendix B), and frequent words
# follow a zeta distribution with alpha 2.
TIMES_COMMON, ALPHA = 10, 2.0


def several(tokens: Tokens, question: str, prefix: str, gold: Sequence[str], cap: int) -> Turn:
    """A question with several answers on one line."""
    return Turn(
        prompt=tokens.join("\n\n", question, tokens.chat.speak, prefix),
        scoring=Recall(tuple(gold)),
        max_new_tokens=cap,
        stop=tokens.line_ends,
        label="question",
    )


def multi_value(tokens: Tokens, group: GroupSpec) -> Item:
    """One name with several numbers."""
    (name,), values = names(group, 1), words.numbers(group.rng, VALUES)
    depths = [group.depth, *(group.rng.random() for _ in values[1:])]
    told = [(depth, f"One magic number of the {name} is {value}.") for depth, value in zip(depths, values, strict=True)]
    head, laid = haystack(tokens, group, told)
    question = f"What are all {VALUES} magic numbers of the {name}?"
    turn = several(tokens, question, f"The magic numbers of the {name} are", values, 12 * VALUES)
    return finished(group, head, laid, turn, range(VALUES))


def multi_query(tokens: Tokens, group: GroupSpec) -> Item:
    """Four names with a number each; two of them are asked for at once."""
    asked, values = names(group, 4), words.numbers(group.rng, 4)
    depths = [group.depth, *(group.rng.random() for _ in values[1:])]
    lines = [f"{NEEDLE.format(name)} {value}." for name, value in zip(asked, values, strict=True)]
    head, laid = haystack(tokens, group, list(zip(depths, lines, strict=True)))
    question = f"What are the magic numbers of the {asked[0]} and of the {asked[1]}?"
    turn = several(tokens, question, NEEDLE.format(asked[0]), values[:2], 40)
    return finished(group, head, laid, turn, [0, 1])


def chain(tokens: Tokens, group: GroupSpec) -> Item:
    """A variable gets a number, a second the first, a third the second; a chain beside it gets another number."""
    mine, other = ([quality + "_" + thing for quality, thing in words.pairs(group.rng, CHAIN)] for _ in range(2))
    values = words.numbers(group.rng, 2)
    told: list[tuple[float, str]] = []
    for variables, value, shift in ((mine, values[0], 0.0), (other, values[1], 0.05)):
        for step, variable in enumerate(variables):
            depth = min(1.0, group.depth * (step + 1) / CHAIN + shift)
            told.append((depth, f"VAR {variable} = {variables[step - 1] if step else value}"))
    head, laid = haystack(tokens, group, told)
    question = f"Which {CHAIN} variables have the value {values[0]}?"
    turn = several(tokens, question, f"The variables with the value {values[0]} are", mine, 16 * CHAIN)
    return finished(group, head, laid, turn, range(CHAIN))


def common_words(tokens: Tokens, group: GroupSpec) -> Item:
    """A list in which three words stand ten times as often as the others."""
    pool = group.rng.sample(words.THINGS, len(words.THINGS))
    common, others = pool[:COMMON], pool[COMMON:]
    weights = [TIMES_COMMON] * COMMON + [1] * len(others)
    return _counted(tokens, group, pool, weights, common)


def frequent_words(tokens: Tokens, group: GroupSpec) -> Item:
    """A list of made-up words whose frequencies follow Zipf's law; the three most frequent are asked for."""
    pool = [first + second for first, second in words.pairs(group.rng, 40)]
    weights = [1 / rank**ALPHA for rank in range(1, len(pool) + 1)]
    return _counted(tokens, group, pool, weights, pool[:COMMON])


def _counted(
    tokens: Tokens, group: GroupSpec, pool: Sequence[str], weights: Sequence[float], gold: Sequence[str]
) -> Item:
    head = tokens.join(tokens.chat.start(), "Here is a list of words. Keep track of how often each comes up.\n")
    room = group.length - len(head)
    drawn = _draw(tokens, group, pool, weights, gold, room)
    laid = lay([tokens.encode(" " + word) for word in drawn], [], room)
    turn = several(tokens, f"Which {COMMON} words come up most often?", "The most frequent words are", gold, 24)
    return Item(
        suite=SUITE,
        task=group.task,
        index=group.index,
        length=group.length,
        context=head + laid.ids,
        turns=(turn,),
        cluster=f"{group.task}-{group.length}-{group.index}",
        meta={"gold": "; ".join(gold), "source": fingerprint()},
    )


def _draw(
    tokens: Tokens, group: GroupSpec, pool: Sequence[str], weights: Sequence[float], gold: Sequence[str], room: int
) -> list[str]:
    """Words that fill ``room`` ids, drawn again until the gold ones really are the most frequent."""
    for _ in range(100):
        drawn: list[str] = []
        size = 0
        while size < room:
            drawn += group.rng.choices(pool, weights)
            size += len(tokens.encode(" " + drawn[-1]))
        counts = Counter(drawn[:-1])  # the last one may be cut; lay() cuts what stands first
        if min(counts[word] for word in gold) > max(counts[word] for word in pool if word not in gold) + 1:
            return drawn[::-1]
    raise ValueError(f"suite lengths: {group.length} tokens are too few to tell the most frequent words; ask for more")


MAKERS: dict[str, Callable[[Tokens, GroupSpec], Item]] = {
    "multi_value": multi_value,
    "multi_query": multi_query,
    "chain": chain,
    "common_words": common_words,
    "frequent_words": frequent_words,
}
