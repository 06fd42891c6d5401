"""What one scheduling round computes, and who gave way for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvgate.lifecycle.recovery import Way
from kvgate.lifecycle.store import Slots


@dataclass(frozen=True)
class Preempted:
    """A victim: which request, how it will come back, why it was chosen and why that way."""

    id: str
    way: Way
    why: str


@dataclass(frozen=True)
class Plan:
    """One round: what to compute.

    Attributes:
        round: its number. ticket: fence of this launch.
        slots: int64 ``[n]``. tokens: int32 ``[n]``, at least 1 each. samples: bool ``[n]``, rows that yield a token.
        admitted: slots that start or resume in this round. restored: those of them whose KV came back from the host.
        preempted: victims of this round. stalled: running rows that wait a round for fenced pages.
        timed_out: ids that ended at their deadline.
    """

    round: int
    ticket: int
    slots: Slots
    tokens: NDArray[np.int32]
    samples: NDArray[np.bool_]
    admitted: tuple[int, ...] = ()
    restored: tuple[int, ...] = ()
    preempted: tuple[Preempted, ...] = ()
    stalled: int = 0
    timed_out: tuple[str, ...] = ()
