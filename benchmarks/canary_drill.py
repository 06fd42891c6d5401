"""The canary controller on simulated traffic: how often it errs at the margin, and what bad policies get to see.

    python benchmarks/canary_drill.py --out results/serving

Needs no model. A few minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvgate.serving.canary.simulate import AT_THE_MARGIN, DRILL, JUDGE, AtTheMargin, drill, leaves_shadow, rolled_back

SCHEMA_VERSION = 1


def main() -> None:
    """Simulate and write ``drill.json`` and ``drill.md``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicates", type=int, default=1000)
    parser.add_argument("--drills", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("results/serving"))
    args = parser.parse_args()
    figures: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "judge": asdict(JUDGE),
        "replicates": args.replicates,
        "at_the_margin": {name: _errors(name, args.replicates) for name in AT_THE_MARGIN},
        "drills": args.drills,
        "drill": {name: _drills(name, args.drills if name != "good" else max(1, args.drills // 4)) for name in DRILL},
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "drill.json").write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")
    (args.out / "drill.md").write_text(_page(figures))


def _errors(name: str, replicates: int) -> dict[str, float]:
    loss = AT_THE_MARGIN[name]
    drawn = [AtTheMargin.draw(loss, seed) for seed in range(replicates)]
    promoted, removed = [d.leaves_shadow() for d in drawn], [d.rolled_back() for d in drawn]
    for seed in range(0, replicates, 50):
        # The formulas are those of the controller: it is asked itself for a part of the replicates.
        assert (leaves_shadow(drawn[seed]), rolled_back(drawn[seed])) == (promoted[seed], removed[seed]), seed
    return {"false_promotion": sum(promoted) / replicates, "false_rollback": sum(removed) / replicates}


def _drills(name: str, count: int) -> dict[str, Any]:
    runs = [drill(DRILL[name], seed) for seed in range(count)]
    exposed = sorted(run.exposed for run in runs)
    return {
        "runs": count,
        "ends": dict(Counter(run.state for run in runs)),
        "exposed_median": statistics.median(exposed),
        "exposed_most": exposed[-1],
        "compared_median": statistics.median(run.compared for run in runs),
        "requests_median": statistics.median(run.requests for run in runs),
        "because": dict(Counter(run.why.split(":")[0] for run in runs if run.state == "rolled_back")),
    }


def _page(figures: dict[str, Any]) -> str:
    lines = [
        "# Canary controller on simulated traffic",
        "",
        f"Policies that lose exactly the margin, {figures['replicates']:,} replicates of 1,500 conversations, a look",
        "after each. False promotion: it ever leaves the shadow. False rollback: under half of the traffic, every",
        "measure at its margin, it is ever rolled back.",
        "",
        "| loss | false promotion | false rollback |",
        "|---|---|---|",
    ]
    lines += [
        f"| {name} | {found['false_promotion']:.3f} | {found['false_rollback']:.3f} |"
        for name, found in figures["at_the_margin"].items()
    ]
    lines += [
        "",
        "Drills from the first shadow on (conversations of 1 to 6 turns, default stages). Exposed: requests that were",
        "answered under the policy. Compared: those it ran on at all, shadows included.",
        "",
        "| policy | runs | ended as | exposed, median (most) | compared | in-scope requests | because of |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in figures["drill"].items():
        ends = ", ".join(f"{state.replace('_', ' ')} {count}" for state, count in found["ends"].items())
        because = ", ".join(f"{why} {count}" for why, count in found["because"].items()) or "-"
        lines.append(
            f"| {name} | {found['runs']} | {ends} | {found['exposed_median']:,.0f} ({found['exposed_most']:,}) | "
            f"{found['compared_median']:,.0f} | {found['requests_median']:,.0f} | {because} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
