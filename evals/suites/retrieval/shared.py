"""Several questions over one shared context: SCBench's observation (Li et al. 2024, arXiv:2412.10319) made small.

A policy that saw the first question while it evicted has kept what that question needs. The second and the third
question show what it threw away.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from kvgate.evals.data.corpus import fingerprint, lay, prose
from kvgate.evals.data.items import Ids, Item
from kvgate.evals.data.tokens import Tokens
from kvgate.evals.suites import words
from kvgate.evals.suites.base import Generated, GroupSpec
from kvgate.evals.suites.multi_turn.dialogue import ask
from kvgate.evals.suites.retrieval.needles import INTRO, NEEDLE, names

QUESTIONS = 3


class Shared(Generated):
    """Three facts in one text, asked for in three turns."""

    name = "shared"
    measures = "Whether one evicted context can serve several questions, the first known at eviction or not."
    why_eviction_hurts = (
        "Eviction guided by the first question keeps what answers it. The second and third question are about other "
        "parts of the same context, and those parts are gone: compare the labels q1, q2 and q3 of one row."
    )
    protocol = "multi_turn"
    tasks: ClassVar = {
        "unaware": "all three questions come after the context was evicted",
        "aware": "the first question stands at the end of the context while it is evicted",
    }
    twins: ClassVar = {"aware": "unaware"}

    def make(self, tokens: Tokens, group: GroupSpec) -> list[Item]:
        """One item with three scored turns. q1 asks for the fact at the item's depth."""
        told, values = names(group, QUESTIONS), words.numbers(group.rng, QUESTIONS)
        depths = [group.depth, *(group.rng.random() for _ in values[1:])]
        needles = [
            (depth, tokens.encode(f"\n{NEEDLE.format(name)} {value}."))
            for depth, name, value in zip(depths, told, values, strict=True)
        ]
        head = tokens.join(tokens.chat.start(), INTRO)
        question = tokens.join("\n\n", f"What is the magic number of the {told[0]}?")
        tail: Ids = question if group.task == "aware" else ()
        room = group.length - len(head) - len(tail)
        laid = lay(prose(tokens, group.rng, group.length), needles, room)
        turns = [
            ask(tokens, rank, f"What is the magic number of the {name}?", NEEDLE.format(name), value)
            for rank, (name, value) in enumerate(zip(told, values, strict=True))
        ]
        first = tokens.join(() if tail else question, tokens.chat.speak, NEEDLE.format(told[0]))
        turns[0] = replace(turns[0], prompt=first)
        return [
            Item(
                suite=self.name,
                task=group.task,
                index=group.index,
                length=group.length,
                context=head + laid.ids + tail,
                turns=tuple(turns),
                cluster=f"{group.length}-{group.index}",
                protocol="multi_turn",
                depth=group.depth,
                facts=tuple((start + len(head), end + len(head)) for start, end in laid.spans),
                meta={"gold": "; ".join(values), "source": fingerprint()},
            )
        ]
