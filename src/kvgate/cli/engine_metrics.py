"""``kvgate metrics --model``: a running engine under the serving loop, with its metrics over HTTP.

Prompts are random token ids from a generated workload: the metrics are about pages and requests, not about answers.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from prometheus_client import generate_latest

from kvgate.cli import metrics as metrics_cli
from kvgate.cli.numbers import whole
from kvgate.cli.replay import DEFAULT_CONFIG
from kvgate.lifecycle.config import load_config
from kvgate.lifecycle.lab.generate import generate
from kvgate.lifecycle.metrics import ManagerMetrics
from kvgate.lifecycle.prefix.value_density import ValueDensity
from kvgate.lifecycle.swap.area import HostArea
from kvgate.lifecycle.swap.disk import MemoryDisk

if TYPE_CHECKING:
    from kvgate.engine.serving import Server


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Register the command: that of the lifecycle room, and a model to run for real."""
    parser = metrics_cli.add_parser(subparsers)
    parser.add_argument("--model", default=None, help='serve with this model ("embedded", a folder or a hub id)')
    parser.add_argument(
        "--requests", type=whole(1, 1_000_000), default=20, help="with --model: requests of the workload to serve"
    )
    parser.set_defaults(run=main)
    return parser


def main(args: argparse.Namespace) -> int:
    """Run it; 0 when done. Without a model the simulator drives the manager."""
    if args.model is None:
        return metrics_cli.main(args)
    server, metrics = build(args)
    stop = None if args.once else metrics_cli.serve(metrics.registry, args.port, args.address)
    try:
        if stop is not None:
            print(f"http://{args.address}:{args.port}/metrics", flush=True)
        server.run()
        if args.once:
            print(generate_latest(metrics.registry).decode(), end="")
        else:
            time.sleep(args.seconds)
    finally:
        if stop is not None:
            stop()
    return 0


def build(args: argparse.Namespace) -> tuple[Server, ManagerMetrics]:
    """A server with the workload's requests queued, and its metrics."""
    # Here, so that the other commands do not wait for torch.
    from kvgate.engine.engine import Engine
    from kvgate.engine.measure import measured_recovery
    from kvgate.engine.models import load_model
    from kvgate.engine.serving import Server

    config = load_config(args.config or DEFAULT_CONFIG)
    loaded = load_model(args.model)
    blocks = loaded.info.layers * loaded.info.kv_heads
    engine = Engine(loaded, pages=args.blocks * blocks, page_size=config.page_size)
    config = replace(config, recovery=measured_recovery(engine, config.recovery))
    metrics = ManagerMetrics(engine.store.page_bytes * blocks)
    area = HostArea.open(MemoryDisk(), config.recovery.host_blocks * engine.store.page_bytes * blocks)
    server = Server(engine, config, time.monotonic, retention=ValueDensity(), area=area, observer=metrics)
    metrics.attach(server.manager, server.store.cache)
    random = np.random.default_rng(0)
    for arrival in generate(args.workload)[: args.requests]:
        prompt = random.integers(10, 1000, arrival.spec.prompt_len).tolist()
        server.submit(arrival.spec, prompt)
    return server, metrics
