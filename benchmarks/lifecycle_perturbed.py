"""Policies on families of workloads: lengths and pool 20 % up and down, arrivals dealt out anew, five unseen seeds.

``--out DIR`` keeps figures and table; one JSON line a run is appended as it is made, so a killed bench goes on.
Needs the shared workloads; says so and leaves where they are not there.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvgate.cli.replay import DEFAULT_CONFIG
from kvgate.lifecycle.config import ManagerConfig, load_config
from kvgate.lifecycle.lab.baseline import Baseline, BaselineConfig
from kvgate.lifecycle.lab.perturb import TUNED_SEEDS, UNSEEN_SEEDS, Variant, variants
from kvgate.lifecycle.lab.report import percentile
from kvgate.lifecycle.lab.simulator import Simulation, Trail
from kvgate.lifecycle.lab.workloads import load_workload
from kvgate.lifecycle.manager import Manager
from kvgate.lifecycle.store import FlatStore

SHARED = Path(__file__).resolve().parents[2] / "shared" / "workloads"
BLOCKS = 2000
REFERENCES = {
    "FCFS": BaselineConfig(),
    "watermark 5 %": BaselineConfig(watermark=0.05),
    "plain priority": BaselineConfig(priority=True),
}
FAMILIES = {
    "mixed_priority": ("managed", "plain priority", "FCFS"),
    "priority_flood": ("managed", "plain priority", "FCFS"),
    "long_generation": ("managed", "managed, no host area", "watermark 5 %"),
    "short_chat": ("managed", "FCFS"),
}
HEAD = (
    "| workload | variant | scheduler | rounds | link s | preemptions | computed again "
    "| TTFT p50 / p99 | longest gap |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def run(scheduler: str, variant: Variant, config: ManagerConfig) -> Trail:
    """One workload through one scheduler."""
    if scheduler in REFERENCES:
        return Baseline(variant.arrivals, replace(REFERENCES[scheduler], blocks=variant.blocks)).run()
    host = 0 if "no host" in scheduler else variant.blocks
    own = replace(config, recovery=replace(config.recovery, host_blocks=host))
    return Simulation(variant.arrivals, lambda c, o: Manager(own, FlatStore(variant.blocks - 1, host), c, (), o)).run()


def figures(variant: Variant, trail: Trail) -> dict[str, Any]:
    """What the table shows of a run."""
    at = np.array([a.at for a in variant.arrivals])
    useful = max(1, trail.computed - int(trail.recomputed.sum()))
    found: dict[str, Any] = {
        "rounds": trail.rounds,
        "link_seconds": round(trail.link_seconds, 3),
        "preemptions": int(trail.preemptions.sum()),
        "recomputed_share": round(float(trail.recomputed.sum()) / useful, 4),
        "finished": trail.state.count("finished"),
        "tenants": {},
    }
    for tenant in sorted({a.spec.tenant for a in variant.arrivals}):
        mine = np.array([a.spec.tenant == tenant for a in variant.arrivals])
        first = (trail.first - at)[mine]
        gap = float(trail.gap[mine & np.isfinite(trail.first)].max(initial=0.0))
        found["tenants"][tenant] = {
            "ttft_p50": percentile(first, 0.5),
            "ttft_p99": percentile(first, 0.99),
            "gap": round(gap, 2),
        }
    return found


def line(entry: dict[str, Any]) -> str:
    """One row of the table."""
    tenants = entry["tenants"].items()
    waits = "; ".join(f"{t} {v['ttft_p50']:.0f} / {v['ttft_p99']:.0f}" for t, v in tenants)
    gaps = "; ".join(f"{t} {v['gap']:.0f}" for t, v in tenants)
    share = f"{100 * entry['recomputed_share']:.1f} %"
    where = (entry["workload"], entry["variant"], entry["scheduler"])
    cells = (*where, entry["rounds"], f"{entry['link_seconds']:.1f}", entry["preemptions"], share, waits, gaps)
    return f"| {' | '.join(map(str, cells))} |"


def main() -> int:
    """Run what is not there yet, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="*", default=list(FAMILIES))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--unseen", action="store_true", help="five shuffles that were not used for tuning, only these")
    args = parser.parse_args()
    if not SHARED.exists():
        print("the shared workloads are not on this machine: nothing to measure")
        return 0
    config = load_config(DEFAULT_CONFIG)
    args.out.mkdir(parents=True, exist_ok=True)
    log = args.out / "perturbed.jsonl"
    done = [json.loads(text) for text in log.read_text().splitlines()] if log.exists() else []
    seen = {(d["workload"], d["variant"], d["scheduler"]) for d in done}
    for name in args.workloads:
        arrivals, _ = load_workload(SHARED / f"{name}.jsonl")
        family = (
            variants(arrivals, BLOCKS, UNSEEN_SEEDS)[5:] if args.unseen else variants(arrivals, BLOCKS, TUNED_SEEDS)
        )
        for variant in family:
            for scheduler in FAMILIES[name]:
                if (name, variant.name, scheduler) in seen:
                    continue
                found = figures(variant, run(scheduler, variant, config))
                entry = {"workload": name, "variant": variant.name, "scheduler": scheduler, **found}
                done.append(entry)
                with log.open("a") as file:
                    file.write(json.dumps(entry, sort_keys=True) + "\n")
                print(line(entry), flush=True)
    order = list(FAMILIES)
    done.sort(key=lambda d: order.index(d["workload"]))
    (args.out / "perturbed.md").write_text("\n".join([HEAD, *map(line, done)]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
