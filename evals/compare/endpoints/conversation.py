"""Items as an endpoint is asked them: token ids, text or messages. The model's own answers are the history. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvgate.evals.compare.endpoints.tokenizing import ASSISTANT, MARKS
from kvgate.evals.data.items import Answer, Choice, Exact, External, Fidelity, Ids, Item, Turn
from kvgate.evals.scoring.scores import score_answer

Decode = Callable[[Sequence[int]], str]
ROOM = 16  # tokens a chat answer may spend before it comes to the words that are scored
BEGIN = '\nBegin your answer with: "{}"'


@dataclass(frozen=True)
class Ask:
    """One request for completions: the prompt in ids, and the most tokens of the answer."""

    ids: Ids
    max_tokens: int


@dataclass(frozen=True)
class ChatAsk:
    """One request for a chat; ``prefix``: how the answer is told to begin, ``content_tokens``: ids of all contents."""

    messages: tuple[tuple[str, str], ...]
    max_tokens: int
    prefix: str
    content_tokens: int


def askable(item: Item) -> bool:
    """Whether the item needs nothing but text: likelihoods and fidelity cannot be had from every endpoint."""
    return not any(isinstance(turn.scoring, Choice | External | Fidelity) for turn in item.turns)


def completion(item: Item, answers: Sequence[Ids]) -> Ask:
    """The request for the turn after ``answers``, each in ids."""
    turn = item.turns[len(answers)]
    return Ask(_history(item, answers) + turn.prompt, turn.max_new_tokens)


def chat(item: Item, answers: Sequence[str], decode: Decode, encode: Callable[[str], Ids]) -> ChatAsk:
    """The same for a chat endpoint. An answer's given beginning is asked for in words: few endpoints let us write it.

    Answers enter the history as the endpoint gave them.
    """
    turn = item.turns[len(answers)]
    ids = _history(item, [encode(answer) for answer in answers]) + turn.prompt
    *before, (_, said) = _messages(ids, decode)
    prefix = said.strip()
    if prefix:
        role, content = before[-1]
        before[-1] = (role, content + BEGIN.format(prefix))
        # In earlier turns the given beginning stands in the history as part of the answer, where the model put it.
    extra = len(encode(prefix)) + ROOM if prefix else ROOM
    content_tokens = sum(token not in MARKS for token in ids)
    return ChatAsk(tuple(before), turn.max_new_tokens + extra, prefix, content_tokens)


def _history(item: Item, answers: Sequence[Ids]) -> Ids:
    ids = item.context
    for turn, answer in zip(item.turns, answers, strict=False):
        ids += turn.prompt + answer + turn.closing
    return ids


def _messages(ids: Ids, decode: Decode) -> list[tuple[str, str]]:
    """Roles and contents; the last one is the beginning of the answer, often empty."""
    assert ids[0] in MARKS, "a chat begins with a role"
    messages: list[tuple[str, list[int]]] = []
    for token in ids:
        if token in MARKS:
            messages.append((MARKS[token], []))
        else:
            messages[-1][1].append(token)
    assert messages[-1][0] == MARKS[ASSISTANT], "the assistant speaks next"
    return [(role, decode(content)) for role, content in messages]


def cut(text: str, turn: Turn, decode: Decode) -> str:
    """The answer up to the first mark that ends it, as the engine of kvgate would have stopped; the mark stays.

    White space in front is not the answer, so a mark found there ends nothing.
    """
    start = len(text) - len(text.lstrip())
    marks = {decode([token]).strip(" ") for token in turn.stop} | set(turn.until)
    ends = [text.find(mark, start) + len(mark) for mark in marks if mark and text.find(mark, start) >= 0]
    return text[: min(ends)] if ends else text


def score(turn: Turn, text: str, prefix: str = "") -> float | None:
    """Score in [0, 1], None for a filler turn.

    A chat answer that repeats the beginning it was given is scored from there on. One that puts the same in words of
    its own is searched for the accepted answer instead of being held to its first word.
    """
    if turn.scoring is None:
        return None
    scoring = turn.scoring
    assert isinstance(scoring, Answer), "items that need likelihoods are not asked"
    if prefix:
        at = text.lower().find(prefix.lower())
        if at >= 0:
            text = text[at + len(prefix) :]
        elif isinstance(scoring, Exact) and scoring.match == "first":
            scoring = replace(scoring, match="word")
    return score_answer(text, scoring)
