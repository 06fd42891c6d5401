"""Puts a service together: engine, manager, driver, metrics."""

from __future__ import annotations

import time
from dataclasses import replace

from kvgate.engine.engine import Engine
from kvgate.engine.measure import measured_recovery
from kvgate.engine.models import LoadedModel
from kvgate.engine.serving import Server
from kvgate.lifecycle.metrics import ManagerMetrics
from kvgate.lifecycle.prefix.value_density import ValueDensity
from kvgate.lifecycle.swap.area import HostArea
from kvgate.lifecycle.swap.disk import MemoryDisk
from kvgate.serving.config import ServeConfig
from kvgate.serving.driver import Driver
from kvgate.serving.service import Exact, Router, Service


def build_service(
    name: str, model: LoadedModel, config: ServeConfig, blocks: int, router: Router | None = None
) -> Service:
    """A service over a pool of ``blocks`` blocks of ``page_size`` tokens. Its driver is not started yet."""
    lifecycle = config.lifecycle
    heads = model.info.layers * model.info.kv_heads
    engine = Engine(model, pages=blocks * heads, page_size=lifecycle.page_size)
    if lifecycle.recovery.host_blocks:
        lifecycle = replace(lifecycle, recovery=measured_recovery(engine, lifecycle.recovery))
    block_bytes = engine.store.page_bytes * heads
    area = HostArea.open(MemoryDisk(), lifecycle.recovery.host_blocks * block_bytes)
    metrics = ManagerMetrics(block_bytes, frozenset(lifecycle.tenants))
    drivers: list[Driver] = []
    server = Server(
        engine,
        lifecycle,
        time.monotonic,
        retention=ValueDensity(),
        area=area if lifecycle.recovery.host_blocks else None,
        observer=metrics,
        compared=lambda id, found: drivers[0].compared(id, found),
    )
    metrics.attach(server.manager, server.store.cache)
    drivers.append(Driver(server, time.monotonic))
    return Service(name, model, config, drivers[0], metrics, router or Exact())
