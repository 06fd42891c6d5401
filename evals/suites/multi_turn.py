"""Told in early turns, asked for in later ones, while the cache stays evicted from turn to turn.

The early turns are prefilled: somebody tells facts and sends notes, and the assistant's scripted replies only acknowledge
them, so no answer stands in the history before the model gives it. The later turns are scored, and the history they see
is the model's own answers.
"""

from __future__ import annotations

from typing import ClassVar

from kvgate.evals.chat import Tokens
from kvgate.evals.items import Exact, Ids, Item, Turn
from kvgate.evals.sources import fingerprint, lay, prose
from kvgate.evals.suites import words
from kvgate.evals.suites.base import Spot, Suite

SCORED = 3
NOTE = 90  # tokens of prose in a filler turn


class MultiTurn(Suite):
    """Facts, updates and standing instructions over filler turns."""

    name = "multi_turn"
    measures = "Whether what was said in early turns still holds in later ones, several questions in a row."
    why_eviction_hurts = (
        "Every turn evicts again, and what one question did not need the next one may. Facts, their updates and standing "
        "instructions are old by the time they matter, and each answer is built on the model's own earlier answers."
    )
    protocol = "multi_turn"
    tasks: ClassVar = {
        "fact": "numbers told in early turns, asked for in later ones",
        "update": "numbers told and then corrected; the correction is asked for",
        "standing": "replies agreed on in early turns, to be given when the cue comes",
    }
    options: ClassVar = {"v": ""}

    def make(self, tokens: Tokens, spot: Spot) -> list[Item]:
        """One item: early turns of exactly ``spot.length`` ids, then scored turns."""
        told, turns, gold = {"fact": _fact, "update": _update, "standing": _standing}[spot.task](tokens, spot)
        head = tokens.join(tokens.chat.start(), "I have some notes for you. ")
        needles = [(depth, exchange(tokens, text)) for depth, text in told]
        room = spot.length - len(head)
        laid = _dialogue(tokens, spot, needles, room)
        shift = len(head)
        return [
            Item(
                suite=self.name,
                task=spot.task,
                index=spot.index,
                length=spot.length,
                context=head + laid[0],
                turns=tuple(turns),
                cluster=f"{spot.task}-{spot.length}-{spot.index}",
                protocol="multi_turn",
                depth=spot.depth,
                facts=tuple((start + shift, end + shift) for start, end in laid[1]),
                meta={"gold": "; ".join(gold), "source": fingerprint()},
            )
        ]


def exchange(tokens: Tokens, text: str | Ids, reply: str = "Noted.") -> Ids:
    """A whole early turn: the next user text and a scripted reply."""
    return tokens.join(tokens.chat.next_user, text, tokens.chat.scripted, reply)


def _dialogue(
    tokens: Tokens, spot: Spot, needles: list[tuple[float, Ids]], room: int
) -> tuple[Ids, tuple[tuple[int, int], ...]]:
    """First user text cut to measure and its reply, then filler turns with the needles between them."""
    first_close = tokens.join(tokens.chat.scripted, "Noted.")
    space = room - len(first_close) - sum(len(ids) for _, ids in needles)
    sentences = prose(tokens, spot.rng, 2 * room)
    fillers: list[Ids] = []
    while True:
        note: list[int] = []
        while len(note) < NOTE:
            note.extend(sentences.pop())
        turn = exchange(tokens, tokens.join("Note: ", note[: 2 * NOTE]))
        if len(turn) > space:
            break
        fillers.append(turn)
        space -= len(turn)
    if space < 0:
        raise ValueError(f"suite lengths: {spot.length} tokens are too few for the turns of multi_turn; ask for more")
    first = tuple(token for piece in sentences for token in piece)[-space:] if space else ()
    laid = lay(fillers, needles, room - len(first_close) - len(first))
    shift = len(first) + len(first_close)
    return first + first_close + laid.ids, tuple((a + shift, b + shift) for a, b in laid.spans)


Told = tuple[list[tuple[float, str]], list[Turn], list[str]]


def _turn(tokens: Tokens, text: str, prefix: str, gold: str, label: str, first: bool) -> Turn:
    opening = tokens.chat.next_user if first else ()
    return Turn(
        prompt=tokens.join(opening, text, tokens.chat.speak, prefix),
        scoring=Exact((gold,)),
        max_new_tokens=10,
        closing=tokens.chat.next_user,
        stop=tokens.join("\n", "."),
        label=label,
    )


def _fact(tokens: Tokens, spot: Spot) -> Told:
    people = spot.rng.sample(words.PEOPLE, SCORED)
    v = spot.options["v"]
    things = spot.rng.sample(words.THINGS, SCORED)
    values = words.numbers(spot.rng, SCORED, 5 if "5" in v else 7)
    names = [f"the {t}" for t in things] if "t" in v else [f"{p}" for p in people]
    form = "The number of {} is"
    q = "What is the number of {}?"
    if "l" in v:
        names = [f"{p}'s {t}" for p, t in zip(people, things)]
        form, q = "The number of {} is", "What is the number of {}?"
    if "m" in v:
        names = [" ".join(x) for x in words.pairs(spot.rng, SCORED)] if "P" in v else things
        form, q = "The magic number of the {} is", "What is the magic number of the {}?"
    told = [(spot.depth, f"Remember this. {form.format(n)} {x}.") for n, x in zip(names, values, strict=True)]
    turns = [
        _turn(tokens, q.format(names[k]), form.format(names[k]), values[k], f"q{rank + 1}", rank == 0)
        for rank, k in enumerate(spot.rng.sample(range(SCORED), SCORED))
    ]
    return told, turns, values


def _update(tokens: Tokens, spot: Spot) -> Told:
    things = spot.rng.sample(words.THINGS, SCORED)
    old, new = words.numbers(spot.rng, SCORED), words.numbers(spot.rng, SCORED)
    form = "The magic number of the {} is"
    told = [(spot.depth / 2, f"Remember this. {form.format(n)} {x}.") for n, x in zip(things, old, strict=True)]
    v = spot.options["v"]
    upd = "Correction. The magic number of the {} is now" if "n" in v else "Correction. The magic number of the {} is"
    told += [(spot.depth, f"{upd.format(n)} {x}.") for n, x in zip(things, new, strict=True)]
    pre = "The magic number of the {} is now" if "n" in v else form
    turns = [
        _turn(
            tokens,
            f"What is the magic number of the {things[k]} now?",
            pre.format(things[k]),
            new[k],
            f"q{rank + 1}",
            rank == 0,
        )
        for rank, k in enumerate(spot.rng.sample(range(SCORED), SCORED))
    ]
    return told, turns, new


def _standing(tokens: Tokens, spot: Spot) -> Told:
    cues = spot.rng.sample(words.THINGS, SCORED)
    replies = words.pairs(spot.rng, SCORED)
    v = spot.options["v"]
    values = [" ".join(r) for r in replies]
    told = [
        (spot.depth, f"From now on, whenever I say {c.upper()}, you reply: {x}")
        for c, x in zip(cues, values, strict=True)
    ]
    if "c" in v:
        told = [(spot.depth, f"From now on, when I say {c}, you say {x}.") for c, x in zip(cues, values, strict=True)]
        pre = "When you say {}, I say"
        turns = [
            _turn(tokens, cues[k].capitalize() + ".", pre.format(cues[k]), values[k], f"q{rank + 1}", rank == 0)
            for rank, k in enumerate(spot.rng.sample(range(SCORED), SCORED))
        ]
        return told, turns, values
    turns = [
        _turn(tokens, cues[k].upper(), "", values[k], f"q{rank + 1}", rank == 0)
        for rank, k in enumerate(spot.rng.sample(range(SCORED), SCORED))
    ]
    return told, turns, values
