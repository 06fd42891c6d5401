"""What the server knows: model, settings, driver, and how requests become jobs. Knows no HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kvgate.compressors.policy import Policy
from kvgate.engine.models import LoadedModel
from kvgate.engine.served import Beside
from kvgate.lifecycle.admission import Decision, Outcome, Reason
from kvgate.lifecycle.metrics import ManagerMetrics
from kvgate.lifecycle.states import Spec
from kvgate.serving.access import CONVERSATION, priority_of, seconds_left, tenant_of
from kvgate.serving.answer import Answer
from kvgate.serving.config import ServeConfig
from kvgate.serving.driver import Channel, Driver, Job
from kvgate.serving.errors import LIMIT, SERVER, ApiError
from kvgate.serving.prompts import Prompts
from kvgate.serving.protocol import Wanted
from kvgate.serving.text import Pieces

_SPENT = {Reason.TOKEN_BUDGET, Reason.CONCURRENCY, Reason.PAGE_QUOTA}


@dataclass(frozen=True)
class Route:
    """How one answer is made. ``arm``: exact, canary, or shadow (exact with a shadow beside it).

    ``in_scope``: an exact answer that the canary's is measured against.
    """

    arm: str = "exact"
    policy: Policy | None = None
    beside: Beside | None = None
    label: str = "exact"
    in_scope: bool = False

    def told(self) -> dict[str, Any]:
        """For the usage field and the header."""
        return {"arm": self.arm, "policy": self.label}


@dataclass(frozen=True)
class Asked:
    """What routing may look at: the conversation's hash key, tokens, and what the caller says of the request."""

    conversation: str
    prompt_tokens: int
    longest: int
    metadata: Mapping[str, str]


class Router(Protocol):
    """Decides how answers are made, and learns how they turned out. Called in the event loop, but for ``done``."""

    def start(self) -> None:
        """The server starts."""

    def stop(self) -> None:
        """The server has ended."""

    def route(self, asked: Asked) -> Route:
        """For one answer."""

    def done(self, asked: Asked, route: Route, job: Job) -> None:
        """It has ended. Called in the driver's thread."""


@dataclass
class Service:
    """See the module docstring.

    Attributes:
        name: the model's, as clients name it. draining: no new requests are taken.
    """

    name: str
    model: LoadedModel
    config: ServeConfig
    driver: Driver
    metrics: ManagerMetrics
    router: Router
    draining: bool = False

    def __post_init__(self) -> None:
        self.prompts = Prompts(self.model.tokenizer, self.model.module.get_input_embeddings().num_embeddings)
        self.pieces = Pieces(self.model.tokenizer)
        self.started = int(time.time())

    @property
    def max_model_len(self) -> int:
        """Longest prompt and answer together: the model's positions, or what the pool holds."""
        pool = self.driver.server.store.total * self.config.lifecycle.page_size
        return min(self.model.info.max_positions, pool)

    def check_model(self, name: str) -> None:
        """ApiError 404 for another model's name."""
        if name != self.name:
            message = f"The model `{name[:100]}` does not exist; this server has `{self.name}`"
            raise ApiError(404, message, code="model_not_found", param="model")

    def jobs(self, wanted: Wanted, headers: Mapping[str, str]) -> tuple[list[Job], Route]:
        """A job for every answer of a request, all made the same way. ApiError where one cannot be taken."""
        self.check_model(wanted.model)
        tenant = tenant_of(headers.get("authorization"), self.config.keys)
        self._check_room(wanted)
        lengths = [self._max_tokens(wanted, len(prompt)) for prompt in wanted.prompts]
        asked = self._asked(
            wanted, headers, tenant, max(len(p) + m for p, m in zip(wanted.prompts, lengths, strict=True))
        )
        # Scoring a given text is no conversation.
        route = Route() if wanted.logprobs is not None and wanted.echo else self.router.route(asked)
        deadline = time.monotonic() + seconds_left(headers, self.config.limits.timeout_s)
        name, priority, loop = uuid.uuid4().hex, priority_of(headers), asyncio.get_running_loop()
        jobs: list[Job] = []
        for prompt, most in zip(wanted.prompts, lengths, strict=True):
            for _ in range(wanted.n):
                spec = Spec(
                    f"{name}-{len(jobs)}",
                    len(prompt),
                    max(1, most),
                    tenant,
                    priority,
                    deadline,
                    self.model.info.weights_hash,
                )
                job = Job(spec, prompt, frozenset(self.model.info.stop_ids), Channel(loop), route.policy, route.beside)
                sampling = replace(wanted.sampling, seed=wanted.sampling.seed + len(jobs) % wanted.n)
                job.answer = Answer(self.model.tokenizer, prompt, sampling, wanted.stops)
                job.answer.logprobs, job.answer.echo = wanted.logprobs, wanted.echo
                job.done = lambda ended: self.router.done(asked, route, ended)
                jobs.append(job)
        return jobs, route

    def _check_room(self, wanted: Wanted) -> None:
        limits = self.config.limits
        if self.draining:
            raise ApiError(503, "the server is shutting down", kind=SERVER, code="draining", retry_s=5)
        if not self.driver.healthy:
            raise ApiError(503, "the engine has failed", kind=SERVER, code="unhealthy", retry_s=30)
        answers = wanted.n * len(wanted.prompts)
        if answers > limits.choices:
            raise ApiError(400, f"{answers} answers were asked for, at most {limits.choices} are made", param="n")
        if self.driver.live + answers > limits.queued:
            raise ApiError(429, "too many requests are waiting", kind=LIMIT, code="queue_full", retry_s=2)
        if any(token >= self.prompts.vocabulary for token in wanted.sampling.bias):
            raise ApiError(400, "logit_bias has a token id outside of the vocabulary", param="logit_bias")

    def _max_tokens(self, wanted: Wanted, prompt: int) -> int:
        """Tokens of an answer; ApiError 400 where prompt and answer are too long for the model or the pool."""
        room = self.max_model_len - prompt
        if wanted.max_tokens is None and room >= 1:
            return min(self.config.limits.max_tokens, room)
        most = 1 if wanted.max_tokens is None else wanted.max_tokens
        if max(1, most) > room:
            raise ApiError(
                400,
                f"This model's maximum context length is {self.max_model_len} tokens, but {prompt} tokens of prompt "
                f"and {most} of answer were asked for",
                code="context_length_exceeded",
                param="messages" if wanted.chat else "prompt",
            )
        return most

    def _asked(self, wanted: Wanted, headers: Mapping[str, str], tenant: str, longest: int) -> Asked:
        given = headers.get(CONVERSATION) or wanted.metadata.get("conversation")
        key = json.dumps([tenant, given or [wanted.user, wanted.opening]])
        conversation = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
        return Asked(conversation, max(map(len, wanted.prompts)), longest, wanted.metadata)


def refusal(decision: Decision) -> ApiError | None:
    """The error behind a manager's decision; None where the request was queued."""
    if decision.outcome is not Outcome.REJECT:
        return None
    if decision.reason in _SPENT:
        return ApiError(429, f"over the limit: {decision.detail}", kind=LIMIT, code=decision.reason.value, retry_s=2)
    if decision.reason is Reason.UNKNOWN_TENANT:
        return ApiError(401, "the API key belongs to no tenant", code=decision.reason.value)
    return ApiError(400, decision.detail or decision.reason.value, code=decision.reason.value)
