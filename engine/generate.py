"""Greedy generation for many rows side by side, and likelihoods of given continuations."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvgate.engine.engine import Engine
from kvgate.engine.sequence import Sequence


@dataclass
class Generated:
    """One row's answer.

    Attributes:
        tokens: generated ids, the one that ended the answer excluded.
        capped: the answer was cut at its limit.
        nan: a NaN was seen in the logits; the answer ends there.
        pending: ids of ``tokens`` that were not fed to the model yet.
    """

    tokens: list[int] = field(default_factory=list)
    capped: bool = False
    nan: bool = False
    pending: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Likelihood:
    """A given continuation: the sum of its log-probabilities in nats, and whether greedy decoding would write it."""

    total: float
    greedy: bool


def generate(
    engine: Engine,
    rows: Several[Sequence],
    logits: Tensor,
    limits: Several[int],
    stops: Several[frozenset[int]],
    ended: Callable[[int, Several[int]], bool] = lambda row, tokens: False,
    unsaid: Callable[[int, Several[int]], bool] = lambda row, tokens: False,
) -> list[Generated]:
    """Continue each row from ``logits`` ``[R, V]`` until a stop id or its limit. Ties go to the lower id.

    ``ended(row, tokens)``: whether the answer so far, its last token included, is complete; for stops that are texts.
    ``unsaid(row, tokens)``: whether nothing has been said yet with ``tokens``, the last of them a stop id: then it does
    not stop the answer but is part of it.
    """
    answers = [Generated() for _ in rows]
    active = list(range(len(rows)))
    while active:
        chosen = logits.argmax(-1).tolist()
        broken = logits.isnan().any(-1).tolist()
        going = []
        for place, index in enumerate(active):
            answer = answers[index]
            answer.pending = []
            if broken[place]:
                answer.nan = True
            elif chosen[place] not in stops[index] or unsaid(index, [*answer.tokens, chosen[place]]):
                answer.tokens.append(chosen[place])
                answer.pending = [chosen[place]]
                complete = ended(index, answer.tokens)
                answer.capped = not complete and len(answer.tokens) >= limits[index]
                if not complete and not answer.capped:
                    going.append(index)
        active = going
        if active:
            logits = engine.extend([rows[index] for index in active], [answers[index].pending for index in active])
    return answers


def continuation_scores(
    engine: Engine, rows: Several[Sequence], logits: Tensor, candidates: Several[Several[Several[int]]]
) -> list[list[float]]:
    """Mean log-probability per token of each row's candidate continuations; see :func:`likelihoods`."""
    found = likelihoods(engine, rows, logits, candidates)
    return [
        [each.total / len(tokens) for each, tokens in zip(row, row_candidates, strict=True)]
        for row, row_candidates in zip(found, candidates, strict=True)
    ]


def likelihoods(
    engine: Engine, rows: Several[Sequence], logits: Tensor, candidates: Several[Several[Several[int]]]
) -> list[list[Likelihood]]:
    """Likelihood of each row's candidate continuations, each fed whole on a fork of its own.

    ``logits`` ``[R, V]`` follow each row's last token. The rows themselves stay as they are.
    """
    forks: list[Sequence] = []
    tokens: list[Several[int]] = []
    try:
        for index, row in enumerate(rows):
            for candidate in candidates[index]:
                if len(candidate) > 1:
                    forks.append(engine.fork(row))
                    tokens.append(candidate[:-1])
        every = engine.extend(forks, tokens, every=True) if forks else logits[:0]
    finally:
        for fork in forks:
            engine.release(fork)
    first = torch.log_softmax(logits, -1)
    best = logits.argmax(-1).tolist()
    found: list[list[Likelihood]] = []
    at = 0
    for index, row_candidates in enumerate(candidates):
        found.append([])
        for candidate in row_candidates:
            rest = torch.log_softmax(every[at : at + len(candidate) - 1], -1)
            at += len(candidate) - 1
            total = float(first[index, candidate[0]])
            total += sum(float(rest[place, token]) for place, token in enumerate(candidate[1:]))
            greedy = best[index] == candidate[0] and rest.argmax(-1).tolist() == list(candidate[1:])
            found[-1].append(Likelihood(total, greedy))
    return found
