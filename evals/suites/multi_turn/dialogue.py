"""Early turns and scored turns of a conversation, in ids."""

from __future__ import annotations

from kvgate.evals.data.corpus import lay, prose
from kvgate.evals.data.items import Answer, Exact, Ids, Turn
from kvgate.evals.data.tokens import Tokens
from kvgate.evals.suites.base import GroupSpec

REPLY = "Noted."
NOTE = 90  # tokens of prose in a filler turn, at least
Spans = tuple[tuple[int, int], ...]


def exchange(tokens: Tokens, text: str | Ids, reply: str = REPLY) -> Ids:
    """A whole early turn: the next user text and a scripted reply."""
    return tokens.join(tokens.chat.next_user, text, tokens.chat.scripted, reply)


def dialogue(tokens: Tokens, group: GroupSpec, head: Ids, needles: list[tuple[float, Ids]]) -> tuple[Ids, Spans]:
    """Exactly ``group.length`` ids: head, a first user text cut to measure, then filler turns around the needles."""
    opened = tokens.join(tokens.chat.scripted, REPLY)
    space = group.length - len(head) - len(opened) - sum(len(ids) for _, ids in needles)
    if space < 0:
        raise ValueError(f"suite lengths: {group.length} tokens are too few for the early turns; ask for more")
    sentences = prose(tokens, group.rng, 2 * group.length)
    fillers: list[Ids] = []
    while len(turn := exchange(tokens, tokens.join("Note: ", _note(sentences)))) <= space:
        fillers.append(turn)
        space -= len(turn)
    first = tuple(token for piece in sentences for token in piece)[-space:] if space else ()
    before = head + first + opened
    laid = lay(fillers, needles, group.length - len(before))
    return before + laid.ids, tuple((start + len(before), end + len(before)) for start, end in laid.spans)


def _note(sentences: list[Ids]) -> Ids:
    """Sentences taken from the end of the list, back in reading order."""
    taken: list[Ids] = []
    while sum(map(len, taken)) < NOTE:
        taken.append(sentences.pop())
    return tuple(token for piece in reversed(taken) for token in piece)[: 2 * NOTE]


def ask(tokens: Tokens, rank: int, text: str, prefix: str, scoring: str | Answer, cap: int = 8) -> Turn:
    """A scored turn: the user text, and the beginning of the answer that the model is to finish.

    A finished sentence ends an answer with a known beginning; a free answer ends where the model ends it.
    """
    return Turn(
        prompt=tokens.join(() if rank else tokens.chat.next_user, text, tokens.chat.speak, prefix),
        scoring=Exact((scoring,), "first") if isinstance(scoring, str) else scoring,
        max_new_tokens=cap,
        closing=tokens.chat.next_user,
        stop=tokens.sentence_ends if prefix else (),
        label=f"q{rank + 1}",
    )
