"""Runs the application under uvicorn, with a drain between SIGTERM and the end."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from kvgate.serving.service import Service

_log = logging.getLogger("kvgate.serve")


class DrainingServer(uvicorn.Server):
    """On the first signal new requests get 503 while running ones end; then, or at a second signal, it exits."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Remember the loop, for signals."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came."""
        if self._service.draining or self._loop is None:
            super().handle_exit(sig, frame)
            return
        self._service.draining = True
        self._loop.call_soon_threadsafe(self._begin)

    def _begin(self) -> None:
        self._drain = asyncio.get_running_loop().create_task(self._wait())

    async def _wait(self) -> None:
        until = time.monotonic() + self._service.config.limits.drain_s
        while self._service.driver.live and time.monotonic() < until:
            await asyncio.sleep(0.05)
        _log.info("drained; %d requests left", self._service.driver.live)
        await asyncio.sleep(0.1)  # the last events are on their way to the clients
        self.should_exit = True


def serve(app: Starlette, service: Service, listening: socket.socket) -> None:
    """Until a signal comes. ``listening``: a bound socket."""
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=5, lifespan="on", timeout_keep_alive=30
    )
    DrainingServer(config, service).run(sockets=[listening])
