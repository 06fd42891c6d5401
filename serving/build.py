"""Puts a service together: engine, manager, driver, metrics."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from kvgate.engine.engine import Engine
from kvgate.engine.measure import measured_recovery
from kvgate.engine.models import LoadedModel
from kvgate.engine.serving import Server
from kvgate.lifecycle.metrics import ManagerMetrics
from kvgate.lifecycle.observer import Both
from kvgate.lifecycle.prefix.value_density import ValueDensity
from kvgate.lifecycle.swap.area import HostArea
from kvgate.lifecycle.swap.disk import MemoryDisk
from kvgate.serving.canary.attach import make_router, withdraw
from kvgate.serving.canary.outcomes import Outcomes
from kvgate.serving.canary.router import CanaryRouter
from kvgate.serving.canary.settings import Canary
from kvgate.serving.config import ServeConfig
from kvgate.serving.driver import Driver, Job
from kvgate.serving.metrics import ArmMetrics, CanaryMetrics
from kvgate.serving.service import Asked, Route, Router, Service


def build_service(
    name: str,
    model: LoadedModel,
    config: ServeConfig,
    blocks: int,
    canary: Canary | None = None,
    state: Path | None = None,
) -> Service:
    """A service over a pool of ``blocks`` blocks of ``page_size`` tokens. Its threads are not started yet.

    ``canary`` with the folder of its journal, ``state``. ValueError where its verdict covers nothing of this server.
    """
    lifecycle = config.lifecycle
    heads = model.info.layers * model.info.kv_heads
    engine = Engine(model, pages=blocks * heads, page_size=lifecycle.page_size)
    if lifecycle.recovery.host_blocks:
        lifecycle = replace(lifecycle, recovery=measured_recovery(engine, lifecycle.recovery))
    block_bytes = engine.store.page_bytes * heads
    area = HostArea.open(MemoryDisk(), lifecycle.recovery.host_blocks * block_bytes)
    metrics = ManagerMetrics(block_bytes, frozenset(lifecycle.tenants))
    arms, outcomes = ArmMetrics(metrics.registry), Outcomes()
    router: Router = Exact(arms, outcomes)
    if canary is not None:
        assert state is not None, "a canary needs a place for its journal"
        router = make_router(canary, model, state, outcomes, arms)
        metrics.registry.register(CanaryMetrics(router.controller.progress, canary.label))
    drivers: list[Driver] = []
    server = Server(
        engine,
        lifecycle,
        time.monotonic,
        retention=ValueDensity(),
        area=area if lifecycle.recovery.host_blocks else None,
        observer=Both(metrics, outcomes),
        compared=lambda id, found: drivers[0].compared(id, found),
    )
    metrics.attach(server.manager, server.store.cache)
    outcomes.attach(server.manager)
    drivers.append(Driver(server, time.monotonic))
    if isinstance(router, CanaryRouter):
        router.rolled_back = lambda: withdraw(drivers[0])
    return Service(name, model, config, drivers[0], metrics, router)


class Exact:
    """A router without a canary: everything exact, nothing compared; times are counted."""

    def __init__(self, metrics: ArmMetrics, outcomes: Outcomes) -> None:
        self._metrics = metrics
        self._outcomes = outcomes

    def start(self) -> None:
        """Nothing to start."""

    def stop(self) -> None:
        """Nothing to stop."""

    def route(self, asked: Asked) -> Route:
        """Exact."""
        return Route()

    def done(self, asked: Asked, route: Route, job: Job) -> None:
        """Count it."""
        self._outcomes.take(job.spec.id)
        self._metrics.ended(route.arm, job)
