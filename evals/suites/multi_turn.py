"""Told in early turns, asked for in later ones, while the cache stays evicted from turn to turn.

The early turns are prefilled: somebody tells facts and sends notes, and the assistant's scripted replies only
acknowledge them, so no answer stands in the history before the model gives it. The later turns are scored, and the
history they see is the model's own answers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from kvgate.evals.chat import Tokens
from kvgate.evals.items import Item, Turn
from kvgate.evals.sources import fingerprint
from kvgate.evals.suites import words
from kvgate.evals.suites.base import Generated, Spot
from kvgate.evals.suites.dialogue import ask, dialogue, exchange

SCORED = 3


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

    def make(self, tokens: Tokens, spot: Spot) -> list[Item]:
        """One item: early turns of exactly ``spot.length`` ids, then scored turns."""
        talk = MAKERS[spot.task](tokens, spot)
        head = tokens.join(tokens.chat.start(), "I have some notes for you. ")
        needles = [(depth, exchange(tokens, text)) for depth, text in talk.told]
        context, spans = dialogue(tokens, spot, head, needles)
        return [
            Item(
                suite=self.name,
                task=spot.task,
                index=spot.index,
                length=spot.length,
                context=context,
                turns=tuple(talk.turns),
                cluster=f"{spot.task}-{spot.length}-{spot.index}",
                protocol="multi_turn",
                depth=spot.depth,
                facts=spans[-SCORED:],
                meta={"gold": "; ".join(talk.gold), "source": fingerprint()},
            )
        ]


@dataclass(frozen=True)
class Talk:
    """What is told early ((depth, user text), the evidence last) and asked later, in order of asking."""

    told: list[tuple[float, str]]
    turns: list[Turn]
    gold: list[str]


def _shuffled(spot: Spot) -> list[int]:
    return spot.rng.sample(range(SCORED), SCORED)


def _names(spot: Spot) -> list[str]:
    return [" ".join(pair) for pair in words.pairs(spot.rng, SCORED)]


def _fact(tokens: Tokens, spot: Spot) -> Talk:
    names, values = _names(spot), words.numbers(spot.rng, SCORED)
    form = "The magic number of the {} is"
    told = [(spot.depth, f"Remember this. {form.format(n)} {x}.") for n, x in zip(names, values, strict=True)]
    turns = [
        ask(tokens, rank, f"What is the magic number of the {names[k]}?", form.format(names[k]), values[k])
        for rank, k in enumerate(_shuffled(spot))
    ]
    return Talk(told, turns, values)


def _update(tokens: Tokens, spot: Spot) -> Talk:
    names, old, new = _names(spot), words.numbers(spot.rng, SCORED), words.numbers(spot.rng, SCORED)
    form = "The magic number of the {} is"
    told = [(spot.depth / 2, f"Remember this. {form.format(n)} {x}.") for n, x in zip(names, old, strict=True)]
    told += [(spot.depth, f"Correction. {form.format(n)} now {x}.") for n, x in zip(names, new, strict=True)]
    turns = [
        ask(tokens, rank, f"What is the magic number of the {names[k]} now?", form.format(names[k]) + " now", new[k])
        for rank, k in enumerate(_shuffled(spot))
    ]
    return Talk(told, turns, new)


def _standing(tokens: Tokens, spot: Spot) -> Talk:
    cues, replies = _names(spot), words.numbers(spot.rng, SCORED)
    form = "reply number of the {} is"
    told = [(spot.depth, f"From now on, the {form.format(c)} {x}.") for c, x in zip(cues, replies, strict=True)]
    turns = [
        ask(tokens, rank, f"I say {cues[k]}. What do you reply?", f"The {form.format(cues[k])}", replies[k])
        for rank, k in enumerate(_shuffled(spot))
    ]
    return Talk(told, turns, replies)


MAKERS: dict[str, Callable[[Tokens, Spot], Talk]] = {"fact": _fact, "update": _update, "standing": _standing}
