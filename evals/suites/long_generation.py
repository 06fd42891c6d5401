"""Answers of hundreds of tokens, so that what is tested is eviction while the answer is being written.

Both tasks go on with plain text instead of answering in a chat: after a question a small chat model ends its list early
(SmolLM2-135M-Instruct after one line to twenty), while a text that is already a list is kept going to the cap.

What the embedded model scores with all of its cache and 520 new tokens: count .95 at 512 tokens of context (6 items),
.89 at 1024 (2); recite .92 at 512 (9 items), .71 at 1024 (5) and .52 at 2048 (2), where it is no longer competent. One
slip shifts every line after it, so most items are near 1 and a few near .2. Counting needs no more than the last lines,
and policies that keep those lose nothing on it; what the context held is tested by reciting.

Two limits of reciting. The list, told twice, has about 400 tokens. At 512 that is most of the context (tokens 11 to 412
at depth .1, 91 to 492 at .9, with the embedded tokenizer), so the depth says little there; plans that judge slices ask
for one depth. And only the first round tests what the context held: of 18 lines a round the start of the answer gives
7, the other 11 come from the context, and from the second round on the answer itself holds the whole list. A window
that holds one reading then loses nothing, whatever became of the context; from there on it is tested whether the answer
keeps to its own lines. With 520 new tokens 46 lines are asked for, 11 of them from the context.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import ClassVar

from kvgate.evals.data.corpus import fingerprint, lay, prose
from kvgate.evals.data.items import Ids, Item, Listing, Turn
from kvgate.evals.data.tokens import Tokens
from kvgate.evals.suites import words
from kvgate.evals.suites.base import Generated, GroupSpec

COUNTED = 5  # lines of the count that are given
BEGUN = 3  # lines given before and after the title of the round that is begun
# The list stands in the context twice: after one reading small models lose their place in it.
READINGS = 2
LIST_TOKENS = 200  # about; longer lists are beyond the embedded model
SHARE = 0.8  # of the context, at most, is list
TITLE = "The rooms again:"


class LongGeneration(Generated):
    """Counting, and going through a list from the context again and again."""

    name = "long_generation"
    measures = "Whether a list or a count is kept going over hundreds of new tokens, line by line at its place."
    why_eviction_hurts = (
        "The cache is evicted after every new token: where the answer stands, what was said and what comes next must "
        "survive in it. One lost line shifts all that follow; repetition and drifting length show it."
    )
    tasks: ClassVar = {
        "count": "counting items upwards from a number, one a line; the last lines are enough to go on",
        "recite": "a list of numbered rooms from the context, repeated round after round",
    }
    options: ClassVar = {"new_tokens": 512}

    @classmethod
    def has_depth(cls, task: str) -> bool:
        """A count needs nothing from the context."""
        return task != "count"

    def make(self, tokens: Tokens, group: GroupSpec) -> list[Item]:
        """One item; the answer has about ``new_tokens`` tokens, and goes on to that cap if the model lets it."""
        wanted = _positive(group.options["new_tokens"])
        return [self._count(tokens, group, wanted) if group.task == "count" else self._recite(tokens, group, wanted)]

    def _count(self, tokens: Tokens, group: GroupSpec, wanted: int) -> Item:
        first = group.rng.randrange(1000, 9000)
        begun = [f"Item {number}" for number in range(first, first + COUNTED)]
        lines = _fill(tokens, (f"Item {number}" for number in count(first + COUNTED)), wanted)
        laid = lay(prose(tokens, group.rng, group.length), [], group.length - len(tokens.bos))
        return self._item(tokens, group, tokens.bos + laid.ids, (), begun, lines, wanted)

    def _recite(self, tokens: Tokens, group: GroupSpec, wanted: int) -> Item:
        rooms = _rooms(tokens, group, min(LIST_TOKENS, int(group.length * SHARE / READINGS)))
        one = [TITLE, *rooms]
        told = tokens.encode("\n" + "\n".join(one * READINGS) + "\n")
        laid = lay(prose(tokens, group.rng, group.length), [(group.depth, told)], group.length - len(tokens.bos))
        start, end = laid.spans[0]
        facts = ((start + len(tokens.bos), end + len(tokens.bos)),)
        # Begun across the end of a round, so that it shows what follows the last room.
        begun = [*rooms[-BEGUN:], *one[: BEGUN + 1]]
        lines = _fill(tokens, (one[place % len(one)] for place in count(BEGUN + 1)), wanted)
        return self._item(tokens, group, tokens.bos + laid.ids, facts, begun, lines, wanted)

    def _item(
        self,
        tokens: Tokens,
        group: GroupSpec,
        context: Ids,
        facts: tuple[tuple[int, int], ...],
        begun: list[str],
        lines: list[str],
        cap: int,
    ) -> Item:
        turn = Turn(
            prompt=tokens.join("\n\n", "\n".join(begun) + "\n"),
            scoring=Listing(tuple(lines)),
            max_new_tokens=cap,
            label=group.task,
        )
        return Item(
            suite=self.name,
            task=group.task,
            index=group.index,
            length=group.length,
            context=context,
            turns=(turn,),
            cluster=f"{group.task}-{group.length}-{group.index}",
            depth=group.depth if facts else None,
            facts=facts,
            meta={"lines": str(len(lines)), "source": fingerprint()},
        )


def _positive(value: object) -> int:
    if not isinstance(value, int) or value < 32:
        raise ValueError(f"suite long_generation: new_tokens {value!r}; use a whole number from 32")
    return value


def _fill(tokens: Tokens, lines: Iterable[str], wanted: int) -> list[str]:
    """The first lines that together have at most ``wanted`` tokens."""
    kept: list[str] = []
    for line in lines:
        wanted -= len(tokens.encode(line + "\n"))
        if wanted < 0:
            break
        kept.append(line)
    return kept


def _rooms(tokens: Tokens, group: GroupSpec, room: int) -> list[str]:
    """As many numbered lines as fit into ``room`` tokens with the title above them."""
    left = room - len(tokens.encode(TITLE + "\n"))
    drawn = words.numbers(group.rng, max(1, room // 5))
    rooms = _fill(tokens, (f"Room {place}: {number}" for place, number in enumerate(drawn, 1)), left)
    if len(rooms) < 2 * BEGUN:
        raise ValueError(f"suite lengths: {group.length} tokens are too few for a list of rooms; ask for more")
    return rooms
