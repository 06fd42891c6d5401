"""``kvgate metrics``: serve a manager's metrics over HTTP while a replay drives it, or print them once."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest, start_http_server

from kvgate.cli.numbers import MOST_BLOCKS, real, whole
from kvgate.cli.replay import DEFAULT_CONFIG
from kvgate.lifecycle.config import load_config
from kvgate.lifecycle.lab.generate import WORKLOADS, generate
from kvgate.lifecycle.lab.simulator import Simulation
from kvgate.lifecycle.manager import Manager
from kvgate.lifecycle.metrics import ManagerMetrics
from kvgate.lifecycle.observer import Both
from kvgate.lifecycle.store import FlatStore


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Register the command."""
    parser = subparsers.add_parser("metrics")
    parser.add_argument("--workload", choices=tuple(WORKLOADS), default="small_mixed", help="what drives the manager")
    parser.add_argument("--config", type=Path, default=None, help="manager settings (YAML)")
    parser.add_argument("--blocks", type=whole(2, MOST_BLOCKS), default=400, help="blocks of the pool")
    parser.add_argument("--port", type=whole(0, 65535), default=9464, help="where to serve /metrics")
    parser.add_argument("--address", default="127.0.0.1", help="interface to listen on")
    parser.add_argument("--seconds", type=real(0, 1e9), default=60.0, help="how long to serve after the replay is done")
    parser.add_argument("--once", action="store_true", help="print the metrics after the replay and leave")
    parser.set_defaults(run=main)
    return parser


def serve(registry: CollectorRegistry, port: int, address: str) -> Callable[[], None]:
    """Serve a registry at ``http://address:port/metrics``; returns what stops it. For a running engine as well.

    Raises ValueError where the port cannot be used.
    """
    try:
        server, thread = start_http_server(port, address, registry)
    except (OSError, OverflowError) as error:
        raise ValueError(f"port {port} on {address}: {error}") from error

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop


def main(args: argparse.Namespace) -> int:
    """Run it; 0 when done."""
    config = load_config(args.config or DEFAULT_CONFIG)
    metrics = ManagerMetrics(config.recovery.bytes_per_block)
    store = FlatStore(args.blocks, config.recovery.host_blocks)
    simulation = Simulation(
        generate(args.workload), lambda clock, seen: Manager(config, store, clock, (), Both(seen, metrics))
    )
    metrics.attach(simulation.manager)
    if args.once:
        simulation.run()
        print(generate_latest(metrics.registry).decode(), end="")
        return 0
    stop = serve(metrics.registry, args.port, args.address)
    print(f"http://{args.address}:{args.port}/metrics", flush=True)
    try:
        simulation.run()
        time.sleep(args.seconds)
    finally:
        stop()
    return 0
