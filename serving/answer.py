"""One answer being written: chooses tokens, turns them into text and log-probabilities, notices stop texts.

Lives in the thread that owns the engine; what it hands out goes to the event loop through ``emit``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvgate.serving.sampling import Sampling
from kvgate.serving.text import Detokenizer, StopTexts


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log-probability in nats, None for a prompt's first one, and those of the likeliest ids."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Piece:
    """A stretch of an answer: its text, the tokens behind it, and their log-probabilities where asked for."""

    text: str
    tokens: int
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass
class Answer:
    """A sink of the serving loop.

    Args:
        tokenizer: of the model. prompt: its ids, for ``echo``. sampling: how to choose. stops: stop texts.
        emit: takes a Piece; tick: told of each token; both called in the thread of the loop.
        logprobs: likeliest tokens to name; None for none.
        echo: log-probabilities of the prompt's tokens are wanted too.
        text: all that was handed out so far.
    """

    tokenizer: Any
    prompt: Sequence[int]
    sampling: Sampling
    stops: tuple[str, ...]
    emit: Callable[[Piece], None] = lambda piece: None
    tick: Callable[[], None] = lambda: None
    logprobs: int | None = None
    echo: bool = False
    text: str = ""
    prompt_logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    _tokens: int = 0
    _pending: list[TokenLogprob] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._text = Detokenizer(self.tokenizer)
        self._cut = StopTexts(self.stops)

    @property
    def reads_prompt(self) -> bool:
        """Whether the prompt's own log-probabilities are wanted."""
        return self.echo and self.logprobs is not None

    @property
    def stopped(self) -> bool:
        """Whether a stop text ended it."""
        return self._cut.stopped

    def choose(self, logits: Tensor, answer: Sequence[int]) -> int:
        """The next id."""
        return self.sampling.choose(logits, answer)

    def take(self, token: int, logits: Tensor) -> bool:
        """Hand out what ``token`` completes; True at a stop text."""
        self._tokens += 1
        self.tick()
        if self.logprobs is not None:
            self._pending.append(_logprob(token, logits, self.logprobs))
        self._give(self._cut.push(self._text.push(token)))
        return self._cut.stopped

    def read(self, first: int, logits: Tensor) -> None:
        """Log-probabilities of the prompt's tokens after ``first``."""
        size = max(0, min(len(logits), len(self.prompt) - 1 - first))
        if size == 0 or self.logprobs is None:
            return
        ids = torch.tensor(list(self.prompt[first + 1 : first + 1 + size]), device=logits.device)
        rows = torch.log_softmax(logits[:size], -1)
        chosen = rows.gather(1, ids[:, None])[:, 0].tolist()
        values, places = rows.topk(max(1, self.logprobs), -1)
        for i, (token, own) in enumerate(zip(ids.tolist(), chosen, strict=True)):
            top = list(zip(places[i].tolist(), values[i].tolist(), strict=True))
            self.prompt_logprobs[first + 1 + i] = TokenLogprob(token, own, _with_own(token, own, top))

    def finish(self) -> None:
        """The answer is over: hand out what was held back."""
        rest = "" if self._cut.stopped else self._cut.push(self._text.flush()) + self._cut.flush()
        if rest or self._pending or self._tokens:
            self._give(rest, last=True)

    def _give(self, text: str, *, last: bool = False) -> None:
        if text or last:
            self.text += text
            self.emit(Piece(text, self._tokens, tuple(self._pending)))
            self._tokens, self._pending = 0, []


def _logprob(token: int, logits: Tensor, most: int) -> TokenLogprob:
    row = torch.log_softmax(logits, -1)
    values, places = row.topk(max(1, most))
    own = float(row[token])
    top = list(zip(places.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, own, _with_own(token, own, top))


def _with_own(token: int, own: float, top: list[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """The likeliest ids, and the chosen one where it is not among them."""
    return tuple(top) if any(id == token for id, _ in top) else (*top, (token, own))
