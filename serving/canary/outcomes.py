"""What the lifecycle manager did to each request: preemptions suffered and caused, tokens computed again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvgate.lifecycle.manager import Manager
from kvgate.lifecycle.observer import NullObserver
from kvgate.lifecycle.requests import Requests
from kvgate.lifecycle.states import Spec


@dataclass
class Outcome:
    """Of one request. ``blamed``: its shares in preemptions of others."""

    preempted: int = 0
    blamed: float = 0.0
    computed: int = 0
    again: int = 0

    @property
    def preemptions(self) -> float:
        """Suffered and caused."""
        return self.preempted + self.blamed

    @property
    def recomputed(self) -> float:
        """Share of its tokens that were computed again."""
        return self.again / self.computed if self.computed else 0.0


class Outcomes(NullObserver):
    """An observer of the manager that keeps an :class:`Outcome` for every request until :meth:`take` asks for it.

    A preemption is blamed on the requests that went on, by the blocks they held: who holds more than its like was the
    more likely cause.
    """

    def __init__(self) -> None:
        self._of: dict[str, Outcome] = {}
        self._manager: Manager | None = None

    def attach(self, manager: Manager) -> None:
        """The manager that is observed."""
        self._manager = manager

    def take(self, id: str) -> Outcome:
        """What became of a request, once."""
        return self._of.pop(id, Outcome())

    def submitted(self, spec: Spec) -> None:
        """Begin."""
        self._of[spec.id] = Outcome()

    def preempted(self, spec: Spec, way: str, blocks: int) -> None:
        """Count it, and blame the others."""
        if spec.id in self._of:
            self._of[spec.id].preempted += 1
        if self._manager is None:
            return
        requests, running = self._manager.requests, self._manager.running
        held = requests.blocks[running].astype(float)
        if held.sum() <= 0:
            return
        for slot, share in zip(running.tolist(), (held / held.sum()).tolist(), strict=True):
            other = self._of.get(requests.spec(slot).id)
            if other is not None:
                other.blamed += share

    def computed(
        self, slots: NDArray[np.int64], requests: Requests, tokens: NDArray[np.int32], again: NDArray[np.int32]
    ) -> None:
        """Add up."""
        for slot, made, repeated in zip(slots.tolist(), tokens.tolist(), again.tolist(), strict=True):
            outcome = self._of.get(requests.spec(slot).id)
            if outcome is not None:
                outcome.computed += made
                outcome.again += repeated
