"""What the serving loop asks of a request's caller, in the thread that owns the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Sink(Protocol):
    """Chooses a request's tokens and takes them as they come. Whatever it raises fails its request, nobody else's."""

    @property
    def reads_prompt(self) -> bool:
        """Whether it wants the logits after every prompt token."""

    def choose(self, logits: Tensor, answer: Sequence[int]) -> int:
        """The next token id, from logits fp32 ``[V]`` after the prompt and ``answer``. Pure."""

    def take(self, token: int, logits: Tensor) -> bool:
        """``token`` was chosen from ``logits`` and is no stop id; True where it completes the answer."""

    def read(self, first: int, logits: Tensor) -> None:
        """Logits ``[T, V]`` after the tokens at positions ``first`` and on. May come again after a preemption."""


class Greedy:
    """The likeliest token, ties to the lower id; takes whatever comes."""

    reads_prompt = False

    def choose(self, logits: Tensor, answer: Sequence[int]) -> int:
        """The likeliest id."""
        return int(logits.argmax())

    def take(self, token: int, logits: Tensor) -> bool:
        """Go on."""
        return False

    def read(self, first: int, logits: Tensor) -> None:
        """Ignore."""
