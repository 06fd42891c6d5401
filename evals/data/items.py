"""Scored examples, in token ids. Built by suites, run by the runner, never decoded and encoded again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Literal

Protocol = Literal["question_unseen", "whole_prompt", "multi_turn"]
Check = Literal["contains", "lacks", "starts", "ends", "upper", "lower", "digits", "bullets", "max_words", "language"]
Ids = tuple[int, ...]


@dataclass(frozen=True)
class Exact:
    """Greedy answer compared with ``accept`` after :func:`kvgate.evals.scoring.normaliser.normalise`.

    ``match``: "word" finds an accepted answer on word boundaries anywhere in the answer's first line; "first" wants it
    at the start of the answer.
    """

    accept: tuple[str, ...]
    match: Literal["word", "first"] = "word"
    kind: Literal["exact"] = "exact"


@dataclass(frozen=True)
class Choice:
    """Likelihood of each candidate continuation; right when ``gold`` has the highest mean log-probability per token."""

    candidates: tuple[Ids, ...]
    gold: int
    kind: Literal["choice"] = "choice"


@dataclass(frozen=True)
class Recall:
    """Share of the ``expected`` answers found on word boundaries anywhere in the answer."""

    expected: tuple[str, ...]
    kind: Literal["recall"] = "recall"


@dataclass(frozen=True)
class Listing:
    """Share of the ``expected`` lines that the answer has, each at its own place. Graded, in [0, 1]."""

    expected: tuple[str, ...]
    kind: Literal["listing"] = "listing"


@dataclass(frozen=True)
class Rule:
    """An instruction that can be checked without a reference answer; see ``evals.scoring.instruction_checks``.

    ``value``: what ``check`` needs (a word, a language code, a number), or "".
    """

    check: Literal[
        "contains", "lacks", "starts", "ends", "upper", "lower", "digits", "bullets", "max_words", "language"
    ]
    value: str = ""
    kind: Literal["rule"] = "rule"


@dataclass(frozen=True)
class Overlap:
    """Best likeness to one of ``accept``: "f1" of bags of words, or "edit" similarity of the first lines. Graded."""

    accept: tuple[str, ...]
    measure: Literal["f1", "edit"] = "f1"
    kind: Literal["overlap"] = "overlap"


@dataclass(frozen=True)
class Fidelity:
    """Not an answer of its own: every policy is fed the exact run's answer and compared with it at each position.

    Scored by top-1 agreement, in [0, 1]; see :mod:`kvgate.evals.run.fidelity`.
    """

    kind: Literal["fidelity"] = "fidelity"


@dataclass(frozen=True)
class External:
    """Scored by somebody else (lm-eval) from what is recorded; the runner writes 0.

    Without ``candidates`` the model writes an answer; with them it gives the log-likelihood of each.
    """

    candidates: tuple[Ids, ...] = ()
    kind: Literal["external"] = "external"


Answer = Exact | Recall | Listing | Rule | Overlap
"""Scored on the generated text, all by :func:`kvgate.evals.scoring.scores.score_answer`."""


@dataclass(frozen=True)
class Turn:
    """One exchange: ``prompt`` is fed, then the model answers.

    Attributes:
        prompt: token ids from the end of the history to the point where the model speaks, template and answer prefix
            included. Never empty.
        scoring: None for a filler turn: the model still answers, and its answer is the history.
        max_new_tokens: cap of the answer.
        closing: ids appended after the model's own answer when another turn follows (end-of-turn marker, newline).
        stop: token ids that end the answer besides the model's end-of-sequence ids (a newline, say); leading blank
            lines are not the answer, so that a newline before anything is said ends nothing.
        label: names the turn in the record ("q1", "update", ...).
        until: texts that end the answer as soon as it holds one of them; they stay in the recorded answer.
    """

    prompt: Ids
    scoring: Answer | Choice | Fidelity | External | None
    max_new_tokens: int = 16
    closing: Ids = ()
    stop: Ids = ()
    label: str = ""
    until: tuple[str, ...] = ()


@dataclass(frozen=True)
class Item:
    """One scored example.

    ``context`` is prefilled exactly and then evicted; ``turns`` follow on the evicted cache (one turn, except under
    ``multi_turn``). Under ``whole_prompt`` the runner evicts with the question inside and holds the last token back.

    Attributes:
        suite, task, index: where it comes from; ``index`` counts within the task.
        length: nominal context length, the slice it belongs to (the real one is ``len(context)``).
        depth: where the evidence stands, 0 = start, 1 = end of the context; None where it makes no sense.
        cluster: items that share a context or source share a cluster, and count as one observation.
        protected: token ranges (start, end) of the context that no policy may evict.
        facts: token ranges of the context that hold the evidence for the answer; for reports only, no policy sees it.
        meta: anything a reader of the record wants (needle, names, source file).
    """

    suite: str
    task: str
    index: int
    length: int
    context: Ids
    turns: tuple[Turn, ...]
    cluster: str
    protocol: Protocol = "question_unseen"
    depth: float | None = None
    protected: tuple[tuple[int, int], ...] = ()
    facts: tuple[tuple[int, int], ...] = ()
    meta: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def item_hash(self) -> str:
        """BLAKE2b-128 over every field: the identity of the item in records."""
        return digest(asdict(self))

    @cached_property
    def context_hash(self) -> str:
        """Items with the same context hash share one prefill."""
        return digest([self.context, self.protected])

    @property
    def longest(self) -> int:
        """Positions the item needs at most, answers included."""
        turns = sum(
            len(turn.prompt) + max(turn.max_new_tokens, _longest_choice(turn)) + len(turn.closing)
            for turn in self.turns
        )
        return len(self.context) + turns


def _longest_choice(turn: Turn) -> int:
    return max(map(len, candidates_of(turn)), default=0)


def candidates_of(turn: Turn) -> tuple[Ids, ...]:
    """The continuations whose likelihood is asked for; none for a turn that the model answers in its own words."""
    return turn.scoring.candidates if isinstance(turn.scoring, Choice | External) else ()


def digest(value: object) -> str:
    """BLAKE2b-128 of the canonical JSON of ``value``."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
