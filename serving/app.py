"""The HTTP side: Starlette routes over a :class:`~kvgate.serving.service.Service`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

import kvgate
from kvgate.serving.access import tenant_of
from kvgate.serving.answering import Answering
from kvgate.serving.errors import SERVER, ApiError
from kvgate.serving.fields import Fields
from kvgate.serving.prompts import parse_messages
from kvgate.serving.protocol import Wanted, parse_body, parse_chat, parse_completion
from kvgate.serving.service import Service

_log = logging.getLogger("kvgate.serve")
_Handler = Callable[[Request], Awaitable[Response]]
_CODES = {404: "not_found", 405: "method_not_allowed"}


def build_app(service: Service) -> Starlette:
    """The application. Starting it starts the engine's thread, and its end ends it."""
    api = Api(service)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.router.start()
        service.driver.start()
        yield
        await asyncio.to_thread(service.driver.stop)
        await asyncio.to_thread(service.router.stop)

    routes = [
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/models", api.models),
        Route("/v1/models/{name:path}", api.model),
        Route("/tokenize", api.tokenize, methods=["POST"]),
        Route("/health", api.health),
        Route("/ready", api.ready),
        Route("/version", api.version),
        Route("/metrics", api.metrics),
    ]
    handlers: dict[Any, Any] = {ApiError: _api_error, HTTPException: _http_error, Exception: _fault}
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)


class Api:
    """Handlers of the routes."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions"""
        return await self._answer(request, parse_chat)

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions"""
        return await self._answer(request, parse_completion)

    async def models(self, request: Request) -> Response:
        """GET /v1/models"""
        tenant_of(request.headers.get("authorization"), self.service.config.keys)
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME"""
        tenant_of(request.headers.get("authorization"), self.service.config.keys)
        self.service.check_model(request.path_params["name"])
        return JSONResponse(self._model())

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize: ids of a prompt or of messages."""
        tenant_of(request.headers.get("authorization"), self.service.config.keys)
        fields = Fields(parse_body(await self._body(request)))
        self.service.check_model(fields.text("model", self.service.name) or self.service.name)
        messages, prompt = fields.raw("messages"), fields.text("prompt")
        fields.finish()
        if (messages is None) == (prompt is None):
            raise ApiError(400, "give either prompt or messages", param="prompt")
        prompts = self.service.prompts
        work = (lambda: prompts.of_text(prompt)) if prompt is not None else (
            lambda: prompts.of_messages(parse_messages(messages))
        )  # fmt: skip
        ids = await asyncio.to_thread(work)
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": self.service.max_model_len})

    async def health(self, request: Request) -> Response:
        """GET /health: the engine works."""
        return PlainTextResponse("ok\n") if self.service.driver.healthy else PlainTextResponse("failed\n", 503)

    async def ready(self, request: Request) -> Response:
        """GET /ready: new requests are taken."""
        ready = self.service.driver.healthy and not self.service.draining
        return PlainTextResponse("ready\n") if ready else PlainTextResponse("not ready\n", 503)

    async def version(self, request: Request) -> Response:
        """GET /version"""
        info = self.service.model.info
        return JSONResponse({"version": kvgate.__version__, "model": info.name, "weights_hash": info.weights_hash})

    async def metrics(self, request: Request) -> Response:
        """GET /metrics, read between two steps of the engine."""
        registry = self.service.metrics.registry
        text = await asyncio.wrap_future(self.service.driver.call(lambda: generate_latest(registry)))
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    # -- inside -----------------------------------------------------------------------------------------------------

    async def _answer(self, request: Request, parse: Callable[[Any, Any], Wanted]) -> Response:
        body = await self._body(request)
        # Long texts take a while to tokenize; the event loop serves other streams meanwhile.
        wanted = await asyncio.to_thread(lambda: parse(parse_body(body), self.service.prompts))
        if self.service.config.log_prompts:
            _log.info("request: %s", body.decode(errors="replace"))
        jobs, route = self.service.jobs(wanted, request.headers)
        return await Answering(self.service, wanted, jobs, route).respond(request)

    async def _body(self, request: Request) -> bytes:
        """The whole body; ApiError 413 as soon as it is too long, however it was announced."""
        most = self.service.config.limits.body_bytes
        announced = request.headers.get("content-length", "0")
        if not announced.isdigit() or int(announced) > most:
            raise _too_long(most)
        parts, size = [], 0
        try:
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise _too_long(most)
                parts.append(part)
        except ClientDisconnect as gone:
            raise ApiError(499, "the client closed the connection") from gone
        return b"".join(parts)

    def _model(self) -> dict[str, Any]:
        service = self.service
        return {
            "id": service.name,
            "object": "model",
            "created": service.started,
            "owned_by": "kvgate",
            "max_model_len": service.max_model_len,
        }


def _too_long(most: int) -> ApiError:
    return ApiError(413, f"the body is longer than {most} bytes", code="request_too_large")


async def _api_error(request: Request, error: ApiError) -> Response:
    return JSONResponse(error.body, error.status, headers=error.headers)


async def _http_error(request: Request, error: HTTPException) -> Response:
    known = ApiError(error.status_code, str(error.detail), code=_CODES.get(error.status_code))
    return JSONResponse(known.body, error.status_code, headers=dict(error.headers or {}))


async def _fault(request: Request, error: Exception) -> Response:
    _log.error("%s %s failed: %s", request.method, request.url.path, type(error).__name__)
    return JSONResponse(ApiError(500, "the server failed", kind=SERVER).body, 500)
