"""Swap, recompute or terminate a preempted sequence: the cheaper end to end. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from kvgate.lifecycle.config import RecoveryConfig

Floats = NDArray[np.float64] | np.float64


class Way(Enum):
    """How a preempted sequence comes back, if it does."""

    SWAP = "swap"
    RECOMPUTE = "recompute"
    TERMINATE = "terminate"


@dataclass(frozen=True)
class Recovery:
    """The way chosen, its cost in seconds until the sequence can go on, and why."""

    way: Way
    seconds: float
    why: str


def prefill_seconds(tokens: Floats, config: RecoveryConfig) -> Floats:
    """Time to compute ``tokens`` again: a linear and an attention part."""
    return tokens / config.prefill_tokens_per_s + config.prefill_quadratic_s * tokens * tokens


def swap_seconds(blocks: Floats, config: RecoveryConfig) -> Floats:
    """Time to move ``blocks`` to the host and back."""
    moved = blocks * config.bytes_per_block
    return moved / config.out_bytes_per_s + moved / config.in_bytes_per_s


def decide(tokens: int, blocks: int, host_free: int, slack: float, config: RecoveryConfig) -> Recovery:
    """How to preempt a sequence of ``tokens`` computed tokens in ``blocks`` blocks.

    Args:
        host_free: blocks the host area could take; a swap is all or nothing.
        slack: seconds to its deadline, inf without one. Termination only where that has passed.
    """
    if slack <= 0.0:
        return Recovery(Way.TERMINATE, 0.0, f"its deadline passed {-slack:.3g} s ago")
    again = float(prefill_seconds(np.float64(tokens), config))
    if blocks == 0 or blocks > host_free:
        return Recovery(Way.RECOMPUTE, again, f"host area has {host_free} of {blocks} blocks")
    moved = float(swap_seconds(np.float64(blocks), config))
    if moved < again:
        return Recovery(Way.SWAP, moved, f"swap {moved:.3g} s under recompute {again:.3g} s")
    return Recovery(Way.RECOMPUTE, again, f"recompute {again:.3g} s at most swap {moved:.3g} s")


def cheapest(
    tokens: NDArray[np.int32], blocks: NDArray[np.int32], host_free: int, config: RecoveryConfig
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Seconds of the cheaper way and of recomputing, for each of several sequences (deadlines aside)."""
    again = np.asarray(prefill_seconds(tokens.astype(np.float64), config))
    moved = np.asarray(swap_seconds(blocks.astype(np.float64), config))
    return np.where((blocks > 0) & (blocks <= host_free), np.minimum(again, moved), again), again
