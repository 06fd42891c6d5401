"""Between the server and the controller: how each answer is made, and what became of it.

The controller lives in a thread of its own, since its journal waits for the disk; the engine's thread only leaves
messages. Routing reads what the controller last decided.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable

import torch

from kvgate.engine.served import Beside
from kvgate.engine.shadows import Compared
from kvgate.evals.data.items import Answer as Rule
from kvgate.lifecycle.pool import OutOfPages
from kvgate.lifecycle.states import State
from kvgate.serving.canary.controller import Controller
from kvgate.serving.canary.outcomes import Outcomes
from kvgate.serving.canary.progress import Move
from kvgate.serving.canary.scoring import difference, rule_of
from kvgate.serving.canary.seen import Seen
from kvgate.serving.canary.settings import Canary
from kvgate.serving.driver import Job
from kvgate.serving.errors import ApiError
from kvgate.serving.metrics import ArmMetrics
from kvgate.serving.service import Asked, Route
from kvgate.serving.text import StopTexts

_log = logging.getLogger("kvgate.canary")
_TICK_S = 0.25


class CanaryRouter:
    """See the module docstring.

    Args:
        canary: what is rolled out. controller: owned by this router's thread once started. outcomes: of the manager.
        metrics: per arm. text_of: tokens to text. rolled_back: called when the policy has to go at once.
    """

    def __init__(
        self,
        canary: Canary,
        controller: Controller,
        outcomes: Outcomes,
        metrics: ArmMetrics,
        text_of: Callable[[tuple[int, ...]], str],
    ) -> None:
        self.canary = canary
        self.controller = controller
        self.rolled_back: Callable[[], None] = lambda: None
        self._outcomes = outcomes
        self._metrics = metrics
        self._text_of = text_of
        self._inbox: queue.SimpleQueue[Seen | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvgate-canary", daemon=True)

    def start(self) -> None:
        """Begin to take outcomes."""
        self._thread.start()

    def stop(self) -> None:
        """Take what is left, then end."""
        self._inbox.put(None)
        self._thread.join(timeout=30)

    # -- in the event loop ------------------------------------------------------------------------------------------

    def route(self, asked: Asked) -> Route:
        """Exact outside of the verdict's scope; inside, what the controller says of the conversation."""
        try:
            rule = rule_of(asked.metadata)
        except ValueError as error:
            raise ApiError(400, str(error), param="metadata") from error
        if self.canary.scope.outside(asked.longest, asked.metadata) is not None:
            return Route()
        try:
            policy = self.canary.policy(asked.prompt_tokens)
        except ValueError:
            return Route()  # a prompt that the budget cannot hold
        compares = self.controller.compares(asked.conversation)
        answer = rule is not None and self.canary.judge.rollout.measure == "score"
        if self.controller.arm(asked.conversation) == "canary":
            return Route("canary", policy, Beside(None, answer) if compares else None, self.canary.label)
        return Route("shadow", None, Beside(policy, answer)) if compares else Route("exact", in_scope=True)

    # -- in the engine's thread -------------------------------------------------------------------------------------

    def done(self, asked: Asked, route: Route, job: Job) -> None:
        """A request has ended: leave a message for the controller."""
        outcome = self._outcomes.take(job.spec.id)
        self._metrics.ended(route.arm, job)
        served = job.served
        if served is None or (route.arm == "exact" and not route.in_scope):
            return
        if served.state is State.CANCELLED:
            return  # the client's doing, whichever arm
        quality, missing = self._quality(asked, route, job)
        error = served.error
        memory = isinstance(error, OutOfPages | torch.OutOfMemoryError)
        first = None if job.first is None else job.first - job.arrived
        if served.state is State.TIMED_OUT and first is None:
            first = math.inf
        self._inbox.put(
            Seen(
                conversation=asked.conversation,
                arm="canary" if route.policy is not None else "exact",
                tokens=len(job.prompt),
                quality=quality,
                missing=missing,
                failed=served.state is State.FAILED and not memory,
                allocation_failure=memory,
                preemptions=outcome.preemptions,
                recomputed=outcome.recomputed,
                first_token_s=first,
                gap_s=job.longest_gap if len(served.fed) > 1 else None,
            )
        )

    def _quality(self, asked: Asked, route: Route, job: Job) -> tuple[float | None, str | None]:
        """Policy minus exact, and why it is missing where it should be there."""
        served = job.served
        if route.beside is None or served is None:
            return None, None
        found = job.compared
        rule = rule_of(asked.metadata)
        by_score = self.canary.judge.rollout.measure == "score"
        if by_score and rule is None:
            return None, None  # nothing says what is right: no quality was to be had
        if served.state is State.FAILED:
            return None, None  # counted as a failure
        if found is None or found.missing is not None:
            return None, "the request ended before its prompt was in" if found is None else found.missing
        if not math.isfinite(found.kl_mean):
            return None, "the two distributions cannot be compared: not a number"
        if not by_score:
            return (found.agreed / found.tokens - 1.0 if found.tokens else None), None
        assert rule is not None, "scored without a rule"
        return self._scored(rule, route, job, found), None

    def _scored(self, rule: Rule, route: Route, job: Job, found: Compared) -> float:
        assert job.answer is not None, "nobody wrote the answer"
        if found.own is None:
            return 0.0  # the same answer, token by token
        stops = StopTexts(job.answer.stops)
        own = stops.push(self._text_of(found.own))
        own += "" if stops.stopped else stops.flush()
        given = job.answer.text
        return difference(rule, given, own) if route.policy is not None else difference(rule, own, given)

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            # Under steady traffic the inbox is never empty; idle conversations are closed all the same.
            if time.monotonic() >= due:
                self._do(lambda: self.controller.tick(time.time()))
                due = time.monotonic() + _TICK_S
            try:
                seen = self._inbox.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                continue
            if seen is None:
                return
            self._do(lambda seen=seen: self.controller.observe(seen, time.time()))  # type: ignore[misc]

    def _do(self, work: Callable[[], Move | None]) -> None:
        try:
            move = work()
        except Exception:
            _log.exception("the canary controller failed; nothing moves until it works again")
            return
        if move is None:
            return
        progress = self.controller.progress
        _log.warning("canary %s: %s, because %s", self.canary.label, progress.place, move.why)
        if move.state == "rolled_back":
            self.rolled_back()
