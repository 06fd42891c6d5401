"""One HTTP request's answers: whole, or streamed as they come. A client that goes away takes its jobs along."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from kvgate.lifecycle.admission import Decision
from kvgate.lifecycle.states import State
from kvgate.serving.answer import Piece
from kvgate.serving.driver import End, Job
from kvgate.serving.errors import SERVER, ApiError
from kvgate.serving.protocol import Wanted
from kvgate.serving.responses import DONE, Choice, Shape, event
from kvgate.serving.service import Route, Service, refusal

T = TypeVar("T")
ARM, POLICY = "x-kvgate-arm", "x-kvgate-policy"


class Answering:
    """See the module docstring."""

    def __init__(self, service: Service, wanted: Wanted, jobs: Sequence[Job], route: Route) -> None:
        self._service = service
        self._wanted = wanted
        self._jobs = jobs
        made = {**route.told(), "weights": service.model.info.weights_hash}
        self._headers = {ARM: route.arm, POLICY: route.label}
        self._choices = [Choice(i, job.prompt) for i, job in enumerate(jobs)]
        prefix = "chatcmpl" if wanted.chat else "cmpl"
        self._shape = Shape(
            f"{prefix}-{jobs[0].spec.id}",
            int(time.time()),
            service.name,
            wanted.chat,
            wanted.logprobs,
            wanted.echo,
            made,
            service.pieces,
        )

    async def respond(self, request: Request) -> Response:
        """Submit the jobs and answer. Raises ApiError where one is refused; then none of them runs."""
        for job in self._jobs:
            self._service.driver.submit(job)
        self._headers["x-request-id"] = self._jobs[0].spec.id
        try:
            await self._unless_gone(request.receive, self._decisions())
            if self._wanted.stream:
                return _Stream(self)
            await self._unless_gone(request.receive, self._collect())
        except BaseException:
            self.cancel()
            raise
        return JSONResponse(self._shape.whole(self._choices), headers=self._headers)

    def cancel(self) -> None:
        """Free whatever the jobs still hold."""
        for job, choice in zip(self._jobs, self._choices, strict=True):
            if choice.end is None:
                self._service.driver.cancel(job.spec.id)

    # -- events -----------------------------------------------------------------------------------------------------

    async def _decisions(self) -> None:
        """Wait until all jobs are queued. ApiError with the first refusal."""
        for job in self._jobs:
            first = await job.channel.events.get()
            error = refusal(first) if isinstance(first, Decision) else _failure(first)
            if error is not None:
                raise error

    async def _collect(self) -> None:
        await asyncio.gather(
            *(self._gather(job, choice) for job, choice in zip(self._jobs, self._choices, strict=True))
        )

    async def _gather(self, job: Job, choice: Choice) -> None:
        while choice.end is None:
            found = await job.channel.events.get()
            if isinstance(found, Piece):
                choice.add(found)
            elif isinstance(found, End):
                self._end(job, choice, found)
                error = _failure(found)
                if error is not None:
                    raise error

    def _end(self, job: Job, choice: Choice, end: End) -> None:
        choice.end = end
        if self._wanted.echo:
            assert job.answer is not None, "nobody wrote the answer"
            choice.prompt_logprobs = job.answer.prompt_logprobs
            tokenizer = self._service.model.tokenizer
            choice.echoed = tokenizer.decode(list(job.prompt), clean_up_tokenization_spaces=False)
            if self._wanted.max_tokens == 0:
                choice.text, choice.logprobs = "", []

    # -- streams ----------------------------------------------------------------------------------------------------

    async def chunks(self) -> AsyncIterator[bytes]:
        """Server-sent events of all answers, in the order in which they come."""
        merged: asyncio.Queue[tuple[int, Piece | End]] = asyncio.Queue()
        movers = [asyncio.create_task(_move(i, job, merged)) for i, job in enumerate(self._jobs)]
        try:
            if self._wanted.chat:
                for choice in self._choices:
                    yield self._shape.role(choice.index)
            left = len(self._jobs)
            while left:
                index, found = await merged.get()
                choice = self._choices[index]
                if isinstance(found, Piece):
                    yield self._shape.piece(choice, found)
                    choice.text += found.text
                    continue
                left -= 1
                self._end(self._jobs[index], choice, found)
                error = _failure(found)
                if error is not None:
                    yield event(error.body)
                    return
                yield self._shape.ended(choice)
            if self._wanted.usage_chunk:
                yield self._shape.usage_chunk(self._choices)
            yield DONE
        finally:
            for mover in movers:
                mover.cancel()

    @property
    def headers(self) -> dict[str, str]:
        """Of the response."""
        return self._headers

    async def _unless_gone(self, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
        """``work``'s result; ApiError where the client disconnects first (nobody reads it)."""
        task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ApiError(499, "the client closed the connection")
            return task.result()
        finally:
            for each in (task, gone):
                each.cancel()


class _Stream(Response):
    """A response of server-sent events that ends, jobs included, when its client goes."""

    def __init__(self, answering: Answering) -> None:
        super().__init__(headers={**answering.headers, "cache-control": "no-cache"}, media_type="text/event-stream")
        del self.headers["content-length"]
        self._answering = answering

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait({sender, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                sender.result()
        except OSError:
            pass  # the connection broke while something was sent
        finally:
            sender.cancel()
            gone.cancel()
            self._answering.cancel()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for chunk in self._answering.chunks():
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _move(index: int, job: Job, merged: asyncio.Queue[tuple[int, Piece | End]]) -> None:
    while True:
        found = await job.channel.events.get()
        if isinstance(found, Piece | End):
            merged.put_nowait((index, found))
        if isinstance(found, End):
            return


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _failure(found: object) -> ApiError | None:
    """The error behind an end that was none."""
    if not isinstance(found, End) or found.state is State.FINISHED:
        return None
    if found.state is State.TIMED_OUT:
        return ApiError(408, "the request's time is over", kind=SERVER, code="timeout")
    if found.state is State.CANCELLED:
        return ApiError(503, "the request was cancelled", kind=SERVER, code="cancelled", retry_s=5)
    return ApiError(500, "the request failed", kind=SERVER, code="failed")
