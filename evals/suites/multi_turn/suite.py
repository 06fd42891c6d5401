"""Told in early turns, asked for in later ones, while the cache stays evicted from turn to turn.

The early turns are prefilled: somebody tells facts and sends notes, and the assistant's scripted replies only
acknowledge them, so no answer stands in the history before the model gives it. The later turns are scored, and the
history they see is the model's own answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from kvgate.evals.data.corpus import fingerprint, prose
from kvgate.evals.data.items import Item, Turn
from kvgate.evals.data.tokens import Tokens
from kvgate.evals.suites import words
from kvgate.evals.suites.base import Generated, GroupSpec
from kvgate.evals.suites.multi_turn.dialogue import ask, dialogue, exchange

FACTS, PAIR = 3, 2
LATER = 40  # tokens of the note between two questions
# Facts of one item have nothing in common but their form: with one relation for all, small models mix them up.
RELATIONS = ("magic number", "ticket code", "phone number", "locker code", "serial number", "zip code")
REPLIES = ("reply number", "answer code")


class MultiTurn(Generated):
    """Facts, updates and standing instructions over filler turns."""

    name = "multi_turn"
    measures = "Whether what was said in early turns still holds in later ones, several questions in a row."
    why_eviction_hurts = (
        "Every turn evicts again, and what one question did not need the next one may. Facts, updates and standing "
        "instructions are old by the time they matter, and each answer is built on the model's own earlier answers."
    )
    protocol = "multi_turn"
    tasks: ClassVar = {
        "fact": "numbers told in early turns, asked for in later ones",
        "update": "numbers told and then corrected; the correction is asked for",
        "standing": "replies agreed on in early turns, to be given when the cue comes",
    }

    def make(self, tokens: Tokens, group: GroupSpec) -> list[Item]:
        """One item: early turns of exactly ``group.length`` ids, then scored turns."""
        talk = MAKERS[group.task](tokens, group)
        head = tokens.join(tokens.chat.start(), "I have some notes for you. ")
        needles = [(depth, exchange(tokens, text)) for depth, text in talk.told]
        context, spans = dialogue(tokens, group, head, needles)
        return [
            Item(
                suite=self.name,
                task=group.task,
                index=group.index,
                length=group.length,
                context=context,
                turns=tuple(talk.turns),
                cluster=f"{group.task}-{group.length}-{group.index}",
                protocol="multi_turn",
                depth=group.depth,
                facts=spans[-len(talk.gold) :],
                meta={"gold": "; ".join(talk.gold), "source": fingerprint()},
            )
        ]


@dataclass(frozen=True)
class Talk:
    """What is told early ((depth, user text), the evidence last) and asked later, in order of asking."""

    told: list[tuple[float, str]]
    turns: list[Turn]
    gold: list[str]


def _fact(tokens: Tokens, group: GroupSpec) -> Talk:
    names, values = _names(group, FACTS), words.numbers(group.rng, FACTS)
    drawn = group.rng.sample(RELATIONS, FACTS)
    forms = [f"The {relation} of the {name} is" for relation, name in zip(drawn, names, strict=True)]
    told = [(group.depth, f"Remember this. {form} {value}.") for form, value in zip(forms, values, strict=True)]
    return Talk(told, _asked(tokens, group, forms, [_question(form) for form in forms], values), values)


def _update(tokens: Tokens, group: GroupSpec) -> Talk:
    old, new = words.numbers(group.rng, PAIR), words.numbers(group.rng, PAIR)
    forms = [f"The magic number of the {name} is" for name in _names(group, PAIR)]
    told = [(group.depth / 2, f"Remember this. {form} {value}.") for form, value in zip(forms, old, strict=True)]
    told += [(group.depth, f"Correction. {form} now {value}.") for form, value in zip(forms, new, strict=True)]
    turns = _asked(tokens, group, [f"{form} now" for form in forms], [_question(form) for form in forms], new)
    return Talk(told, _with_note(tokens, group, turns), new)


def _standing(tokens: Tokens, group: GroupSpec) -> Talk:
    names, values = _names(group, PAIR), words.numbers(group.rng, PAIR)
    forms = [f"{reply} of the {name} is" for reply, name in zip(REPLIES, names, strict=True)]
    told = [(group.depth, f"From now on, the {form} {value}.") for form, value in zip(forms, values, strict=True)]
    cues = [f"I say {name}. What do you reply?" for name in names]
    turns = _asked(tokens, group, [f"The {form}" for form in forms], cues, values)
    return Talk(told, _with_note(tokens, group, turns), values)


def _names(group: GroupSpec, count: int) -> list[str]:
    return [" ".join(pair) for pair in words.pairs(group.rng, count)]


def _question(form: str) -> str:
    return f"What is t{form.removeprefix('T').removesuffix(' is')}?"


def _asked(tokens: Tokens, group: GroupSpec, prefixes: list[str], texts: list[str], values: list[str]) -> list[Turn]:
    """The scored turns, in an order of their own."""
    order = group.rng.sample(range(len(values)), len(values))
    return [ask(tokens, rank, texts[k], prefixes[k], values[k]) for rank, k in enumerate(order)]


def _with_note(tokens: Tokens, group: GroupSpec, turns: list[Turn]) -> list[Turn]:
    """One more note before the last question, answered by the model and not scored."""
    text = tokens.join("Note: ", *prose(tokens, group.rng, 2 * LATER)[:LATER])[:LATER]
    note = Turn(
        prompt=tokens.join(text, tokens.chat.speak),
        scoring=None,
        max_new_tokens=6,
        closing=tokens.chat.next_user,
        stop=tokens.sentence_ends,
        label="note",
    )
    return [*turns[:-1], note, turns[-1]]


MAKERS: dict[str, Callable[[Tokens, GroupSpec], Talk]] = {"fact": _fact, "update": _update, "standing": _standing}
