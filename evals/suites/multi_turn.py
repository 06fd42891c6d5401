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
from kvgate.evals.items import Exact, Ids, Item, Turn
from kvgate.evals.sources import fingerprint, lay, prose
from kvgate.evals.suites import words
from kvgate.evals.suites.base import Spot, Suite

SCORED = 3
REPLY = "Noted."
NOTE = 90  # tokens of prose in a filler turn, at least
Spans = tuple[tuple[int, int], ...]


class MultiTurn(Suite):
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
        context, spans = _dialogue(tokens, spot, head, needles)
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


def exchange(tokens: Tokens, text: str | Ids, reply: str = REPLY) -> Ids:
    """A whole early turn: the next user text and a scripted reply."""
    return tokens.join(tokens.chat.next_user, text, tokens.chat.scripted, reply)


def _dialogue(tokens: Tokens, spot: Spot, head: Ids, needles: list[tuple[float, Ids]]) -> tuple[Ids, Spans]:
    """Exactly ``spot.length`` ids: head, a first user text cut to measure, then filler turns around the needles."""
    opened = tokens.join(tokens.chat.scripted, REPLY)
    space = spot.length - len(head) - len(opened) - sum(len(ids) for _, ids in needles)
    if space < 0:
        raise ValueError(f"suite lengths: {spot.length} tokens are too few for the turns of multi_turn; ask for more")
    sentences = prose(tokens, spot.rng, 2 * spot.length)
    fillers: list[Ids] = []
    while len(turn := exchange(tokens, tokens.join("Note: ", _note(sentences)))) <= space:
        fillers.append(turn)
        space -= len(turn)
    first = tuple(token for piece in sentences for token in piece)[-space:] if space else ()
    before = head + first + opened
    laid = lay(fillers, needles, spot.length - len(before))
    return before + laid.ids, tuple((start + len(before), end + len(before)) for start, end in laid.spans)


def _note(sentences: list[Ids]) -> Ids:
    """Sentences taken from the end of the list, back in reading order."""
    taken: list[Ids] = []
    while sum(map(len, taken)) < NOTE:
        taken.append(sentences.pop())
    return tuple(token for piece in reversed(taken) for token in piece)[: 2 * NOTE]


@dataclass(frozen=True)
class Talk:
    """What is told early ((depth, user text), the evidence last) and asked later, in order of asking."""

    told: list[tuple[float, str]]
    turns: list[Turn]
    gold: list[str]


def ask(tokens: Tokens, rank: int, text: str, prefix: str, gold: str) -> Turn:
    """A scored turn: the user text, and the beginning of the answer that the model is to finish."""
    return Turn(
        prompt=tokens.join(() if rank else tokens.chat.next_user, text, tokens.chat.speak, prefix),
        scoring=Exact((gold,), "first"),
        max_new_tokens=10,
        closing=tokens.chat.next_user,
        stop=tokens.join("\n", "."),
        label=f"q{rank + 1}",
    )


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
    form = "the reply to {} is"
    told = [(spot.depth, f"From now on, {form.format(c)} {x}.") for c, x in zip(cues, replies, strict=True)]
    turns = [
        ask(tokens, rank, f"{cues[k].capitalize()}.", f"As agreed, {form.format(cues[k])}", replies[k])
        for rank, k in enumerate(_shuffled(spot))
    ]
    return Talk(told, turns, replies)


MAKERS: dict[str, Callable[[Tokens, Spot], Talk]] = {"fact": _fact, "update": _update, "standing": _standing}
