"""The shared workloads through the managed scheduler and the reference, and the public traces through the prefix cache.

Prints one table each, and the trade-offs behind the default configuration; ``--out DIR`` keeps the figures as JSON and
the tables as Markdown. Needs the shared workloads and traces; says so and leaves where they are not there.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvgate.cli.replay import DEFAULT_CONFIG, simulate
from kvgate.lifecycle.config import ManagerConfig, load_config
from kvgate.lifecycle.lab.baseline import Baseline, BaselineConfig
from kvgate.lifecycle.lab.prefix_replay import replay
from kvgate.lifecycle.lab.report import summarise
from kvgate.lifecycle.lab.workloads import load_workload

SHARED = Path(__file__).resolve().parents[2] / "shared"
WORKLOADS = (
    "short_chat", "very_long_prompts", "long_generation", "cancel_storm", "mixed_priority", "noisy_neighbour",
    "over_admission", "impossible_request", "priority_flood",
)  # fmt: skip
SIZES = (1000, 3000, 10_000, 30_000)
POLICIES = ("lru", "lfu", "ttl", "value_density", "belady")
HEAD = (
    "| workload | scheduler | done / cancelled / rejected / stuck | steps | preemptions (most on one) | computed again "
    "| TTFT p50 / p99 | longest gap | e2e p99 |\n|---|---|---|---|---|---|---|---|---|"
)


def managed(name: str, config: ManagerConfig) -> dict[str, Any]:
    """Figures of the managed scheduler."""
    arrivals, unit = load_workload(SHARED / "workloads" / f"{name}.jsonl")
    return summarise(arrivals, simulate(arrivals, unit, config, 2000).trail, unit, config.recovery.bytes_per_block)


def reference(name: str, *, priority: bool) -> dict[str, Any]:
    """Figures of the reference scheduler."""
    arrivals, unit = load_workload(SHARED / "workloads" / f"{name}.jsonl")
    return summarise(arrivals, Baseline(arrivals, BaselineConfig(priority=priority)).run(), unit)


def row(name: str, scheduler: str, found: dict[str, Any]) -> str:
    """One line of the workload table; waits per tenant where there are several."""
    total, tenants = found["total"], found["tenants"]
    states = total["states"]
    parts = tenants if 1 < len(tenants) < 4 else {"": total}

    def each(field: str, *keys: str) -> str:
        def show(part: dict[str, Any]) -> str:
            return " / ".join("-" if part[field][k] is None else f"{part[field][k]:.0f}" for k in keys)

        return "; ".join(f"{tenant} {show(part)}".strip() for tenant, part in parts.items())

    last = total["end_to_end"]["p99"]
    ends = " / ".join(str(states.get(s, 0)) for s in ("finished", "cancelled", "rejected", "waiting"))
    cells = (
        name,
        scheduler,
        ends,
        str(found["rounds"]),
        f"{total['preemptions']} ({total['most_preemptions_of_one']})",
        f"{100 * found['recomputed_share']:.1f} %",
        each("ttft", "p50", "p99"),
        each("token_gap", "max"),
        "-" if last is None else f"{last:.0f}",
    )
    return f"| {' | '.join(cells)} |"


def workloads(config: ManagerConfig) -> tuple[str, dict[str, Any]]:
    """Table and figures over all workloads."""
    lines, figures = [HEAD], {}
    bare = replace(config, recovery=replace(config.recovery, host_blocks=0))
    for name in WORKLOADS:
        found = {"reference, FCFS": reference(name, priority=False), "managed": managed(name, config)}
        if name in ("mixed_priority", "priority_flood"):
            found["reference, priority"] = reference(name, priority=True)
        if found["managed"]["total"]["preemptions"]:
            found["managed, no host area"] = managed(name, bare)
        figures[name] = found
        fresh = [row(name, scheduler, found[scheduler]) for scheduler in sorted(found, reverse=True)]
        print("\n".join(fresh), flush=True)
        lines += fresh
    return "\n".join(lines), figures


def traces() -> tuple[str, dict[str, Any]]:
    """Hit rates of all prefix policies on the public traces."""
    lines = ["| trace | policy | " + " | ".join(f"{s:,} blocks" for s in SIZES) + " |", "|---|---|---|---|---|---|"]
    figures: dict[str, Any] = {}
    for trace in ("conversation", "synthetic"):
        arrivals, _ = load_workload(SHARED / "traces" / f"mooncake_{trace}_trace.jsonl")
        for policy in POLICIES:
            rates = {size: replay(arrivals, policy, size).rate for size in SIZES}
            figures.setdefault(trace, {})[policy] = rates
            lines.append(f"| {trace} | {policy} | " + " | ".join(f"{100 * r:.1f} %" for r in rates.values()) + " |")
            print(lines[-1], flush=True)
    return "\n".join(lines), figures


def trade_offs(config: ManagerConfig) -> tuple[str, dict[str, Any]]:
    """What aging, caution and the prior cost and buy, around the default."""
    lines = [HEAD]
    figures: dict[str, Any] = {}
    varied: list[tuple[str, str, ManagerConfig]] = []
    for rounds in (40, 60, 80, 120, 200):
        varied.append(("mixed_priority", f"aging_rounds {rounds}", replace(config, aging_rounds=rounds)))
    for z in (0.0, 0.5, 1.0):
        varied.append(("long_generation", f"z {z:g}", replace(config, admission=replace(config.admission, z=z))))
    for mean in (0.25, 0.28, 0.33, 0.4, 0.6):
        changed = replace(config, estimator=replace(config.estimator, prior_mean=mean))
        varied.append(("long_generation", f"prior_mean {mean:g}", changed))
    for rounds in (300, 500, 700, 900):
        changed = replace(config, admission=replace(config.admission, resume_rounds=rounds))
        varied.append(("long_generation", f"resume_rounds {rounds}", changed))
    for name, what, changed in varied:
        figures[f"{name}: {what}"] = found = managed(name, changed)
        lines.append(row(name, what, found))
        print(lines[-1], flush=True)
    return "\n".join(lines), figures


def main() -> int:
    """Run all, or the named parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=("workloads", "traces", "trade_offs", []), default=[])
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    if not SHARED.exists():
        print("the shared workloads and traces are not on this machine: nothing to measure")
        return 0
    config = load_config(DEFAULT_CONFIG)
    for part in args.parts or ("workloads", "traces", "trade_offs"):
        text, figures = traces() if part == "traces" else (workloads if part == "workloads" else trade_offs)(config)
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / f"{part}.md").write_text(text + "\n")
            (args.out / f"{part}.json").write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
