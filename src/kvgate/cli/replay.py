"""``kvgate replay``: a workload or public trace through the manager, a reference scheduler, or the prefix cache."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvgate.cli.numbers import MOST_BLOCKS, MOST_SEED, real, whole
from kvgate.lifecycle.config import ManagerConfig, load_config
from kvgate.lifecycle.lab.baseline import POLICIES, Baseline, BaselineConfig
from kvgate.lifecycle.lab.generate import WORKLOADS, generate
from kvgate.lifecycle.lab.prefix_replay import BELADY, replay
from kvgate.lifecycle.lab.report import SCHEMA_VERSION, summarise, table
from kvgate.lifecycle.lab.simulator import LinearCost, Simulation, one_step
from kvgate.lifecycle.lab.workloads import Arrival, load_workload
from kvgate.lifecycle.manager import Manager
from kvgate.lifecycle.prefix.catalog import CATALOG
from kvgate.lifecycle.store import FlatStore
from kvgate.typed import is_file, is_folder

MANAGED = "managed"
_PREFIX = (*CATALOG, BELADY)
DEFAULT_CONFIG = Path(__file__).resolve().parent.parent / "configs" / "lifecycle" / "default.yaml"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Register the command."""
    parser = subparsers.add_parser("replay")
    names = ", ".join(WORKLOADS)
    parser.add_argument("workload", help=f"workload JSONL, Mooncake JSONL, Azure CSV, or one of: {names}")
    choices = (MANAGED, *POLICIES, *_PREFIX)
    parser.add_argument("--policy", choices=choices, default=MANAGED, help="scheduler, or prefix-cache policy")
    parser.add_argument("--config", type=Path, default=None, help="manager settings (YAML)")
    parser.add_argument(
        "--blocks", type=whole(2, MOST_BLOCKS), default=2000, help="blocks of the pool; one stays unused"
    )
    parser.add_argument(
        "--cache-blocks", type=whole(1, MOST_BLOCKS), default=3000, help="prefix cache size, for prefix policies"
    )
    parser.add_argument("--watermark", type=real(0, 0.99), default=0.0, help="reference schedulers: fraction kept free")
    parser.add_argument(
        "--ttft-bound", type=real(0, 1e12), default=None, help="time to first token that counts as good"
    )
    parser.add_argument("--seed", type=whole(0, MOST_SEED), default=0, help="for generated workloads")
    parser.add_argument("--json", type=Path, default=None, help="write the figures here")
    parser.set_defaults(run=main)
    return parser


def main(args: argparse.Namespace) -> int:
    """Run it; 0 when done. ValueError names bad input in one line."""
    if args.blocks < 2:
        raise ValueError(f"--blocks {args.blocks}: needs at least 2")
    if args.json is not None:
        _require_writable(args.json)
    path = Path(args.workload)
    arrivals, unit = (
        load_workload(path) if is_file(path) or is_folder(path) else (_generated(args.workload, args.seed), "step")
    )
    if args.policy in _PREFIX:
        figures: dict[str, Any] = _prefix(arrivals, args)
        rate, hits = figures["hit_rate"], figures["hits"]
        print(f"{args.policy}: {100 * rate:.1f} % of {figures['blocks']:,} blocks hit ({hits:,})")
    else:
        figures = _schedule(arrivals, unit, args)
        print(table(figures))
    if args.json is not None:
        _write(args.json, {"workload": path.name, "policy": args.policy, **figures})
    return 0


def _require_writable(path: Path) -> None:
    """ValueError, before any time is spent, for figures that could not be written."""
    if is_folder(path):
        raise ValueError(f"--json {path}: is a folder; name a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(path.name + ".part").touch()
        path.with_name(path.name + ".part").unlink()
    except (OSError, ValueError) as error:
        raise ValueError(f"--json {str(path)!r:.200}: cannot be written: {error!s:.100}; name another file") from error


def _generated(name: str, seed: int) -> list[Arrival]:
    if name not in WORKLOADS:
        raise ValueError(f"{name:.200}: no such file, and no generated workload; those are {', '.join(WORKLOADS)}")
    return generate(name, seed)


def _prefix(arrivals: Sequence[Arrival], args: argparse.Namespace) -> dict[str, Any]:
    done = replay(arrivals, args.policy, args.cache_blocks)
    sizes = {"capacity": done.capacity, "blocks": done.blocks, "hits": done.hits, "evicted": done.evicted}
    return {"schema_version": SCHEMA_VERSION, **sizes, "hit_rate": done.rate}


def simulate(arrivals: Sequence[Arrival], unit: str, config: ManagerConfig, blocks: int) -> Simulation:
    """A finished simulation of the managed scheduler, with one block of the pool unused as in the reference."""
    cost = one_step if unit == "step" else LinearCost()
    host = config.recovery.host_blocks
    run = Simulation(arrivals, lambda clock, seen: Manager(config, FlatStore(blocks - 1, host), clock, (), seen), cost)
    run.run()
    return run


def _schedule(arrivals: Sequence[Arrival], unit: str, args: argparse.Namespace) -> dict[str, Any]:
    config = load_config(args.config or DEFAULT_CONFIG)
    if args.policy == MANAGED:
        trail = simulate(arrivals, unit, config, args.blocks).trail
    else:
        if unit != "step":
            raise ValueError(f"policy {args.policy}: the reference schedulers count steps; this trace is in {unit}")
        rules = BaselineConfig(priority=args.policy == "priority", watermark=args.watermark)
        trail = Baseline(arrivals, replace(rules, blocks=args.blocks)).run()
    return summarise(arrivals, trail, unit, config.recovery.bytes_per_block, args.ttft_bound)


def _write(path: Path, figures: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")
    part.replace(path)
