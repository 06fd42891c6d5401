"""The waiting queue: who is looked at next. Knows order only, not whether anything fits."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from kvgate.lifecycle.requests import Requests
from kvgate.lifecycle.tenants import Tenants

_Key = tuple[bool, int, float, int]
NOBODY = 2**31 - 1  # no priority is that high


@dataclass
class Cutoff:
    """Set while the queue is looked at: who is not looked at any more in this round.

    Attributes:
        level: requests of this priority and above (less urgent) wait. accounts: tenants at a limit of their own.
        lifting: whether waiting still lifts requests; without it each stands where its priority puts it.
    """

    level: int = NOBODY
    lifting: bool = True
    accounts: set[int] = field(default_factory=set)

    def lower(self, level: int) -> None:
        """Let only requests more urgent than ``level`` pass from now on."""
        self.level = min(self.level, level)

    def close(self, account: int) -> None:
        """No more requests of this tenant."""
        self.accounts.add(account)


class WaitingQueue:
    """Waiting slots, first come first served within (tenant, priority), merged by level and virtual counter.

    The level of a queue is its priority, lifted by one for every ``aging_rounds`` its head has waited. Order: preempted
    requests that are overdue, then tenants under their minimum share, then level, then the tenant's virtual counter,
    then arrival.
    """

    def __init__(self, requests: Requests, tenants: Tenants, aging_rounds: int, resume_rounds: int) -> None:
        self._requests = requests
        self._tenants = tenants
        self._aging = aging_rounds
        self._resume = resume_rounds
        self._queues: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self._resuming: dict[int, None] = {}  # preempted slots, in the order in which they began to wait
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, slot: int) -> None:
        """Add a slot at its place of arrival."""
        insort(self._queues.setdefault(self._queue(slot), []), (int(self._requests.seq[slot]), slot))
        self._size += 1
        if self._requests.preemptions[slot] > 0:
            self._resuming[slot] = None

    def remove(self, slot: int) -> None:
        """Take a slot out; raises KeyError if it does not stand in the queue."""
        name = self._queue(slot)
        queue = self._queues.get(name, [])
        entry = (int(self._requests.seq[slot]), slot)
        at = bisect_left(queue, entry)
        if at >= len(queue) or queue[at] != entry:
            raise KeyError(f"slot {slot} does not wait")
        del queue[at]
        if not queue:
            del self._queues[name]
        self._size -= 1
        self._resuming.pop(slot, None)

    def level(self, slot: int, round_: int) -> int:
        """Its priority, lifted by waiting; an overdue request stands with the most urgent."""
        if self.overdue(slot, round_):
            return 0
        waited = int(self._requests.waited[slot]) + round_ - int(self._requests.since[slot])
        return max(0, int(self._requests.priority[slot]) - waited // self._aging)

    def overdue(self, slot: int, round_: int) -> bool:
        """It was preempted and has not run for so long that it must resume as soon as it fits."""
        requests = self._requests
        return bool(requests.preemptions[slot] > 0 and round_ - int(requests.since[slot]) >= self._resume)

    def most_urgent(self) -> int:
        """The most urgent priority that waits, aging aside."""
        return min((priority for _, priority in self._queues), default=NOBODY)

    def resuming(self) -> list[int]:
        """Slots that were preempted, in the order in which they began to wait."""
        return list(self._resuming)

    def candidates(self, round_: int, cutoff: Cutoff) -> Iterator[int]:
        """Slots in the order they should be looked at; slots may be removed, and the cutoff lowered, meanwhile."""
        overdue = list(takewhile(lambda slot: self.overdue(slot, round_), self._resuming))
        first: set[int] = set()
        for slot in overdue:
            if not cutoff.lifting:
                break
            if self._requests.priority[slot] < cutoff.level and self._account(slot) not in cutoff.accounts:
                first.add(slot)
                yield slot
        under = self._tenants.under_share()
        heap: list[tuple[_Key, int, list[tuple[int, int]]]] = []
        for queue in self._queues.values():
            heap.append((self._key(queue[0], under, round_, cutoff.lifting), 0, queue))
        heapq.heapify(heap)
        while heap:
            _, at, queue = heapq.heappop(heap)
            if at >= len(queue) or self._requests.priority[queue[at][1]] >= cutoff.level:
                continue
            entry = queue[at]
            if self._account(entry[1]) in cutoff.accounts:
                continue
            fresh = self._key(entry, under, round_, cutoff.lifting)
            if heap and heap[0][0] < fresh:  # its tenant was served since, or lifting is over: back into the heap
                heapq.heappush(heap, (fresh, at, queue))
                continue
            if entry[1] not in first:
                yield entry[1]
            if at < len(queue) and queue[at] == entry:
                at += 1
            if at < len(queue):
                heapq.heappush(heap, (self._key(queue[at], under, round_, cutoff.lifting), at, queue))

    def __iter__(self) -> Iterator[int]:
        for queue in self._queues.values():
            yield from (slot for _, slot in queue)

    def _account(self, slot: int) -> int:
        return int(self._requests.account[slot])

    def _queue(self, slot: int) -> tuple[int, int]:
        return self._account(slot), int(self._requests.priority[slot])

    def _key(self, entry: tuple[int, int], under: NDArray[np.bool_], round_: int, lifting: bool) -> _Key:
        seq, slot = entry
        account = int(self._requests.account[slot])
        favoured = bool(under[account])
        level = self.level(slot, round_) if lifting else int(self._requests.priority[slot])
        return not favoured, level, float(self._tenants.counter[account]), seq
