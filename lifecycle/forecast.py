"""Expected demand for blocks in the rounds to come, given what runs now. Pure.

Each running request holds ``ceil((length + t) / page_size)`` blocks at round ``t`` with the probability that it is
still alive then, and none afterwards. The sum over requests is the expected demand; independence gives its variance.
That probability is mixed with "runs to its bound" in proportion to the prompt's share of the request, wholly where the
prompt is as long as the output bound: a preemption wastes the prompt and wins the output, so the longer the prompt, the
less it is admitted on a guess.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvgate.lifecycle.footprint import Footprint

Floats = NDArray[np.float64]
Singles = NDArray[np.float32]


@dataclass(frozen=True)
class Group:
    """Requests as parallel arrays of one length N: ``account`` int, ``length`` tokens of KV held or needed now,
    ``prompt``, ``generated`` so far, ``bound`` (max_tokens) and ``cap``, the most blocks it may hold (0: no limit)."""

    account: NDArray[np.int32]
    length: NDArray[np.int32]
    prompt: NDArray[np.int32]
    generated: NDArray[np.int32]
    bound: NDArray[np.int32]
    cap: NDArray[np.int32]


@dataclass(frozen=True)
class Demand:
    """Expected blocks and their variance at each point of a grid of rounds, fp64 ``[T]`` each."""

    mean: Floats
    variance: Floats

    def __add__(self, other: Demand) -> Demand:
        return Demand(self.mean + other.mean, self.variance + other.variance)

    def peak(self, z: float) -> float:
        """The highest of mean + z standard deviations."""
        if z == 0.0:
            return float(self.mean.max(initial=0.0))
        return float((self.mean + z * np.sqrt(self.variance)).max(initial=0.0))


def grid(horizon: int, points: int) -> Floats:
    """``points`` rounds from 0 to ``horizon``, denser near now, where they matter most."""
    return np.floor(horizon * np.linspace(0.0, 1.0, points) ** 2)


def expectation(group: Group, survival: Floats, at: Floats, footprint: Footprint) -> tuple[Singles, Singles]:
    """Chance of being alive and blocks held then, fp32 ``[N, T]`` each, of each request at the rounds ``at``.

    ``survival`` ``[accounts, bins + 1]`` are the estimator's curves.
    """
    bins = survival.shape[1] - 1
    curves = survival.astype(np.float32).ravel()
    start = group.account.astype(np.int32) * (bins + 1)
    ahead = at.astype(np.float32)
    scale = (bins / group.bound).astype(np.float32)
    share = group.generated * scale
    then = np.minimum((share[:, None] + ahead * scale[:, None]).astype(np.int32), bins)
    alive = curves.take(start + np.minimum(share.astype(np.int32), bins - 1))
    chance = curves.take(start[:, None] + then) / np.maximum(alive, np.float32(1e-9))[:, None]
    caution = np.minimum(1.0, 2.0 * group.prompt / (group.prompt + group.bound)).astype(np.float32)[:, None]
    chance += caution * ((then < bins) - chance)
    blocks = footprint.steady(group.length.astype(np.float32)[:, None] + ahead)
    if group.cap.any():
        most = np.where(group.cap > 0, group.cap, np.inf).astype(np.float32)
        blocks = np.minimum(blocks, most[:, None])
    return chance, blocks
