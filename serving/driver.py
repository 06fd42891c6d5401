"""The thread that owns the engine. The event loop talks to it through an inbox; answers come back step by step.

Nothing here waits for a client, and no client waits for another's reading: events of a step are handed to the event
loop in one call, into queues that hold at most an answer.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

from kvgate.compressors.policy import Policy
from kvgate.engine.served import Beside, Served
from kvgate.engine.serving import Server
from kvgate.engine.shadows import Compared
from kvgate.lifecycle.admission import Decision, Outcome
from kvgate.lifecycle.states import Spec, State
from kvgate.serving.answer import Answer, Piece

_log = logging.getLogger("kvgate.serve")
_IDLE_S = 0.5
_REST_S = 0.005  # after a round in which nothing could run
_TROUBLE = 3  # rounds in a row that failed as a whole: the engine is not healthy
T = TypeVar("T")


@dataclass(frozen=True)
class End:
    """An answer's end: its request's ``state``, ``reason`` stop or length, tokens generated and found in the cache."""

    state: State
    reason: str
    tokens: int
    cached: int
    error: str | None = None


Event = Decision | Piece | End


@dataclass
class Channel:
    """Where one answer's events arrive, in the event loop's thread."""

    loop: asyncio.AbstractEventLoop
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)


@dataclass
class Job:
    """A request on its way through the driver.

    Attributes:
        spec, prompt, stops: as for the server. answer: its sink. policy, beside: as in :class:`Served`.
        done: called in the driver's thread with the job when it has ended.
        arrived, first, last, longest_gap: clock times of arrival, first and last token; the longest gap between two.
        told: its end was handed out.
    """

    spec: Spec
    prompt: tuple[int, ...]
    stops: frozenset[int]
    channel: Channel
    policy: Policy | None = None
    beside: Beside | None = None
    done: Callable[[Job], None] | None = None
    arrived: float = 0.0
    first: float | None = None
    last: float | None = None
    longest_gap: float = 0.0
    answer: Answer | None = None
    served: Served | None = None
    compared: Compared | None = None
    told: bool = False

    def noted(self, now: float) -> None:
        """A token came."""
        if self.first is None:
            self.first = now
        elif self.last is not None:
            self.longest_gap = max(self.longest_gap, now - self.last)
        self.last = now


class Driver:
    """Runs the serving loop in a thread of its own.

    Args:
        server: touched by this thread only, from :meth:`start` on. clock: seconds.
    """

    def __init__(self, server: Server, clock: Callable[[], float]) -> None:
        self.server = server
        self._clock = clock
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._jobs: dict[str, Job] = {}
        self._outbox: list[tuple[Channel, Event]] = []
        self._stop = False
        self._trouble = 0
        self._resting = False
        self._thread = threading.Thread(target=self._run, name="kvgate-engine", daemon=True)

    # -- from any thread --------------------------------------------------------------------------------------------

    @property
    def healthy(self) -> bool:
        """Whether the thread lives and rounds succeed."""
        return self._thread.is_alive() and self._trouble < _TROUBLE

    @property
    def live(self) -> int:
        """Requests on their way, roughly."""
        return len(self._jobs)

    def jobs(self) -> list[Job]:
        """Requests on their way. Only in the driver's thread."""
        return list(self._jobs.values())

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; live requests are cancelled."""
        self.call(self._shut).result(timeout=60)
        self._thread.join(timeout=60)

    def submit(self, job: Job) -> None:
        """Queue a request; its first event is the manager's decision."""
        self._inbox.put(lambda: self._submit(job))

    def cancel(self, id: str) -> None:
        """The client is gone: pages are free before the next step."""
        self._inbox.put(lambda: self._cancel(id))

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Run ``work`` between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        self._inbox.put(run)
        return future

    def compared(self, id: str, found: Compared) -> None:
        """What a shadow showed; for the server's ``compared``. Called in the thread of the loop."""
        job = self._jobs.get(id)
        if job is not None:
            job.compared = found
            self._close(job)

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop:
            self._read_inbox(_IDLE_S if not self.server.busy else _REST_S if self._resting else 0.0)
            self._resting = False
            if self.server.busy:
                self._step()
            self._hand_out()

    def _read_inbox(self, wait_s: float) -> None:
        try:
            work = self._inbox.get(timeout=wait_s) if wait_s else self._inbox.get_nowait()
            while True:
                try:
                    work()
                except Exception:
                    _log.exception("a message to the engine failed")
                work = self._inbox.get_nowait()
        except queue.Empty:
            pass

    def _step(self) -> None:
        try:
            plan = self.server.step()
            self._trouble = 0
            if len(plan.slots) == 0 and not self.server.shadows.writing:
                self._resting = True
        except Exception as error:
            self._trouble += 1
            _log.error("a round failed as a whole: %s: %s", type(error).__name__, error)
            if self._trouble >= _TROUBLE and not self._jobs:
                raise
        self._collect()

    def _collect(self) -> None:
        over = [j for j in self._jobs.values() if j.served is not None and j.served.state.ended]
        for job in over:
            if not job.told:
                self._ended(job)

    def _submit(self, job: Job) -> None:
        job.arrived = self._clock()
        assert job.answer is not None, "nobody writes the answer"
        job.answer.emit = lambda piece: self._outbox.append((job.channel, piece))
        job.answer.tick = lambda: job.noted(self._clock())
        try:
            decision = self.server.submit(
                job.spec, job.prompt, job.stops, sink=job.answer, policy=job.policy, beside=job.beside
            )
        except Exception as error:
            self._outbox.append((job.channel, End(State.FAILED, "error", 0, 0, error=str(error))))
            return
        self._outbox.append((job.channel, decision))
        if decision.outcome is not Outcome.REJECT:
            job.served = self.server.requests[job.spec.id]
            self._jobs[job.spec.id] = job

    def _cancel(self, id: str) -> None:
        job = self._jobs.get(id)
        if job is not None:
            self.server.cancel(id)
            self._collect()

    def _ended(self, job: Job) -> None:
        served, answer = job.served, job.answer
        assert served is not None, "it never began"
        assert answer is not None, "nobody writes the answer"
        answer.finish()
        capped = len(served.tokens) >= served.spec.max_tokens and not answer.stopped
        ended_by_id = bool(served.fed) and served.fed[-1] in served.stops
        reason = "length" if capped and not ended_by_id else "stop"
        error = None if served.error is None else f"{type(served.error).__name__}: {served.error}"
        if error is not None:
            _log.error("request %s failed: %s", served.spec.id, error)
        end = End(served.state, reason, len(served.fed), served.hit, error=error)
        self._outbox.append((job.channel, end))
        job.told = True
        self.server.requests.pop(served.spec.id, None)
        self._close(job)

    def _close(self, job: Job) -> None:
        """A job is forgotten once its request has ended and its shadow, if any, has reported."""
        served = job.served
        if served is None or not served.state.ended or not job.told:
            return
        if job.beside is not None and served.switched and job.compared is None:
            return
        self._jobs.pop(served.spec.id, None)
        if job.done is not None:
            try:
                job.done(job)
            except Exception:
                _log.exception("request %s: its outcome could not be noted", served.spec.id)

    def _hand_out(self) -> None:
        """One call into each event loop for all events of the step."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Channel, Event]]] = {}
        for channel, event in self._outbox:
            by_loop.setdefault(channel.loop, []).append((channel, event))
        self._outbox = []
        for loop, events in by_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_deliver, events)

    def _shut(self) -> None:
        for id in list(self._jobs):
            self.server.cancel(id)
        self._collect()
        self._stop = True


def _deliver(events: list[tuple[Channel, Event]]) -> None:
    for channel, event in events:
        channel.events.put_nowait(event)
