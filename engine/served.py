"""One request as its caller sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvgate.lifecycle.states import Spec, State


@dataclass
class Served:
    """A request and what became of it.

    Attributes:
        spec: what was asked. prompt: its token ids. stops: ids that end it. adapter: part of the prefix namespace.
        tokens: generated so far, the stop id excluded. fed: all sampled ids, the stop id included.
        state: where it is or how it ended.
        hit: prompt tokens that came from the prefix cache instead of being computed, over all its starts.
    """

    spec: Spec
    prompt: tuple[int, ...]
    stops: frozenset[int] = frozenset()
    adapter: str = ""
    tokens: list[int] = field(default_factory=list)
    fed: list[int] = field(default_factory=list)
    state: State = State.QUEUED
    hit: int = 0

    def known(self) -> NDArray[np.int64]:
        """Token ids known so far: prompt and sampled."""
        return np.array([*self.prompt, *self.fed], np.int64)
