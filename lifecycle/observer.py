"""What the manager tells metrics and simulators about; the null observer listens to nothing."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvgate.lifecycle.requests import Requests
from kvgate.lifecycle.states import Spec


class Observer(Protocol):
    """Told of every event once, after it happened."""

    def submitted(self, spec: Spec) -> None:
        """A request was queued."""

    def rejected(self, spec: Spec, reason: str) -> None:
        """A request was refused for good."""

    def started(self, spec: Spec, waited: int) -> None:
        """A request began to run or resumed; ``waited`` rounds in total so far."""

    def preempted(self, spec: Spec, way: str, blocks: int) -> None:
        """A request gave up its device blocks."""

    def restored(self, spec: Spec, blocks: int) -> None:
        """Blocks came back from the host."""

    def corrupt(self, spec: Spec) -> None:
        """A host copy was unusable; the request is recomputed."""

    def short_of_pages(self, blocks: int) -> None:
        """Running requests needed ``blocks`` blocks more than there were."""

    def out_of_pages(self, rows: int) -> None:
        """A round of ``rows`` rows did not fit although it was planned: the estimate of its memory was wrong."""

    def launch_overdue(self, pages: int) -> None:
        """A launch has not signalled in time: ``pages`` pages that wait for it were set aside. An alarm."""

    def audited(self, orphans: int, miscounted: int) -> None:
        """An audit found so many pages without an owner (set aside), and so many with a wrong count (an alarm)."""

    def computed(
        self, slots: NDArray[np.int64], requests: Requests, tokens: NDArray[np.int32], again: NDArray[np.int32]
    ) -> None:
        """A round ran: tokens per row, of which ``again`` had been computed before."""

    def sampled(self, slots: NDArray[np.int64], requests: Requests) -> None:
        """A round ran: these rows have a token more."""

    def reused(self, spec: Spec, tokens: int, *, own: bool) -> None:
        """A request started with tokens out of the prefix cache; ``own``: it had computed them itself before."""

    def ended(self, spec: Spec, state: str, seconds: float) -> None:
        """A request ended, ``seconds`` of clock time after it arrived."""


class NullObserver:
    """Listens to nothing."""

    def submitted(self, spec: Spec) -> None:
        """Ignore."""

    def rejected(self, spec: Spec, reason: str) -> None:
        """Ignore."""

    def started(self, spec: Spec, waited: int) -> None:
        """Ignore."""

    def preempted(self, spec: Spec, way: str, blocks: int) -> None:
        """Ignore."""

    def restored(self, spec: Spec, blocks: int) -> None:
        """Ignore."""

    def corrupt(self, spec: Spec) -> None:
        """Ignore."""

    def short_of_pages(self, blocks: int) -> None:
        """Ignore."""

    def out_of_pages(self, rows: int) -> None:
        """Ignore."""

    def launch_overdue(self, pages: int) -> None:
        """Ignore."""

    def audited(self, orphans: int, miscounted: int) -> None:
        """Ignore."""

    def sampled(self, slots: NDArray[np.int64], requests: Requests) -> None:
        """Ignore."""

    def reused(self, spec: Spec, tokens: int, *, own: bool) -> None:
        """Ignore."""

    def computed(
        self, slots: NDArray[np.int64], requests: Requests, tokens: NDArray[np.int32], again: NDArray[np.int32]
    ) -> None:
        """Ignore."""

    def ended(self, spec: Spec, state: str, seconds: float) -> None:
        """Ignore."""


class Both(NullObserver):
    """Passes every event on to two observers."""

    def __init__(self, first: Observer, second: Observer) -> None:
        self._each = (first, second)

    def submitted(self, spec: Spec) -> None:
        """Pass on."""
        for one in self._each:
            one.submitted(spec)

    def rejected(self, spec: Spec, reason: str) -> None:
        """Pass on."""
        for one in self._each:
            one.rejected(spec, reason)

    def started(self, spec: Spec, waited: int) -> None:
        """Pass on."""
        for one in self._each:
            one.started(spec, waited)

    def preempted(self, spec: Spec, way: str, blocks: int) -> None:
        """Pass on."""
        for one in self._each:
            one.preempted(spec, way, blocks)

    def restored(self, spec: Spec, blocks: int) -> None:
        """Pass on."""
        for one in self._each:
            one.restored(spec, blocks)

    def corrupt(self, spec: Spec) -> None:
        """Pass on."""
        for one in self._each:
            one.corrupt(spec)

    def short_of_pages(self, blocks: int) -> None:
        """Pass on."""
        for one in self._each:
            one.short_of_pages(blocks)

    def out_of_pages(self, rows: int) -> None:
        """Pass on."""
        for one in self._each:
            one.out_of_pages(rows)

    def launch_overdue(self, pages: int) -> None:
        """Pass on."""
        for one in self._each:
            one.launch_overdue(pages)

    def audited(self, orphans: int, miscounted: int) -> None:
        """Pass on."""
        for one in self._each:
            one.audited(orphans, miscounted)

    def sampled(self, slots: NDArray[np.int64], requests: Requests) -> None:
        """Pass on."""
        for one in self._each:
            one.sampled(slots, requests)

    def reused(self, spec: Spec, tokens: int, *, own: bool) -> None:
        """Pass on."""
        for one in self._each:
            one.reused(spec, tokens, own=own)

    def ended(self, spec: Spec, state: str, seconds: float) -> None:
        """Pass on."""
        for one in self._each:
            one.ended(spec, state, seconds)

    def computed(
        self, slots: NDArray[np.int64], requests: Requests, tokens: NDArray[np.int32], again: NDArray[np.int32]
    ) -> None:
        """Pass on."""
        for one in self._each:
            one.computed(slots, requests, tokens, again)
