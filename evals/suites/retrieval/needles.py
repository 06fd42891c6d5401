"""What retrieval tasks share: prose with told lines in it, a question with the beginning of its answer."""

from __future__ import annotations

from collections.abc import Sequence

from kvgate.evals.data.corpus import Laid, fingerprint, lay, prose
from kvgate.evals.data.items import Exact, Ids, Item, Recall, Turn
from kvgate.evals.data.tokens import Tokens
from kvgate.evals.suites import words
from kvgate.evals.suites.base import GroupSpec

SUITE = "retrieval"
INTRO = "Read this text. It holds numbers that you will be asked about.\n"
NEEDLE = "The magic number of the {} is"


def names(group: GroupSpec, count: int) -> list[str]:
    """Different two-word names."""
    return [" ".join(pair) for pair in words.pairs(group.rng, count)]


def haystack(tokens: Tokens, group: GroupSpec, told: Sequence[tuple[float, str]]) -> tuple[Ids, Laid]:
    """Template and introduction, then prose with the told lines at their depths, to exactly ``group.length`` ids."""
    head = tokens.join(tokens.chat.start(), INTRO)
    room = group.length - len(head)
    needles = [(depth, tokens.encode("\n" + line)) for depth, line in told]
    return head, lay(prose(tokens, group.rng, max(room, 0)), needles, room)


def ask(tokens: Tokens, question: str, prefix: str, gold: str, label: str = "question") -> Turn:
    """The question, and the beginning of the answer that the model is to finish with a number."""
    return Turn(
        prompt=tokens.join("\n\n", question, tokens.chat.speak, prefix),
        scoring=Exact((gold,), "first"),
        max_new_tokens=8,
        stop=tokens.sentence_ends,
        label=label,
    )


def finished(group: GroupSpec, head: Ids, laid: Laid, turn: Turn, facts: Sequence[int]) -> Item:
    """The item; ``facts`` says which of the told lines hold the evidence."""
    return Item(
        suite=SUITE,
        task=group.task,
        index=group.index,
        length=group.length,
        context=head + laid.ids,
        turns=(turn,),
        cluster=f"{group.task}-{group.length}-{group.index}",
        depth=group.depth,
        facts=tuple((laid.spans[fact][0] + len(head), laid.spans[fact][1] + len(head)) for fact in facts),
        meta={"gold": "; ".join(_gold(turn)), "source": fingerprint()},
    )


def _gold(turn: Turn) -> tuple[str, ...]:
    match turn.scoring:
        case Exact(accept):
            return accept[:1]
        case Recall(expected):
            return expected
    raise AssertionError(f"no gold in {turn.scoring}")
