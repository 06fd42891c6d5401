"""``kvgate plan``: what a plan would run, and whether its items can pass its gate."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from kvgate.evals.gates import load_gate
from kvgate.evals.power import Population, gate_power
from kvgate.evals.power_cli import describe

if TYPE_CHECKING:
    from kvgate.evals.config import SuiteChoice


def add_parser(subparsers: Any) -> None:
    """Add ``plan`` to an argparse subparsers object."""
    parser = subparsers.add_parser(
        "plan",
        help="what a plan would run; with --power, the items its gate needs",
        description="Shows a plan without loading its model. With --power, simulates a policy without any true loss "
        "and says how many items a suite needs so that it passes the plan's gate.",
    )
    parser.add_argument("plan", nargs="?", default="quick", help="plan name or YAML file (quick)")
    parser.add_argument("--gate", help="gate name or YAML file (default: the plan's)")
    parser.add_argument("--power", type=float, nargs="?", const=0.9, help="wanted chance to pass (.9 if left out)")
    parser.add_argument("--discordance", type=float, default=0.05, help="share of items whose score differs (.05)")
    parser.add_argument("--cluster-size", type=int, default=1, help="items that share a context (1)")
    parser.add_argument("--cap", type=int, default=20_000, help="most items to consider (20000)")
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Print the plan. ValueError for input that makes no sense."""
    from kvgate.evals.cells import columns
    from kvgate.evals.config import load_plan

    config = load_plan(args.plan, {"gate": args.gate} if args.gate else None)
    gate = load_gate(config.gate)
    found = columns(config)
    sizes = {choice.name: _items(choice) for choice in config.suites}
    print(f"plan {config.name}: model {config.model}, gate {gate.name}, seed {config.seed}")
    for name, (items, slices) in sizes.items():
        print(f"  {name:16} about {items} items, {slices} (length, depth) slices")
    cells = sum(items for items, _ in sizes.values()) * len(found)
    print(f"  {len(found)} rows an item: {', '.join(column.label for column in found)}; about {cells} cells")
    if args.power is None:
        return 0
    slices = max(count for _, count in sizes.values()) if "depth" in gate.slice_by else max(_lengths(config.suites))
    needed = argparse.Namespace(
        gate=gate.name, discordance=args.discordance, power=args.power, cap=args.cap, suites=len(sizes), slices=slices
    )
    population = Population(0.0, args.discordance, cluster_size=args.cluster_size)
    answer = gate_power(gate, population, suites=len(sizes), slices=slices, power=args.power, cap=args.cap)
    print("\n".join(describe(answer, needed)))
    return 0


def _lengths(suites: tuple[SuiteChoice, ...]) -> list[int]:
    from kvgate.evals.suites.base import DEFAULT_COUNTS

    return [len(choice.counts or DEFAULT_COUNTS) for choice in suites]


def _items(choice: SuiteChoice) -> tuple[int, int]:
    """Items asked for and (length, depth) slices; a suite that cannot fill a slice makes fewer."""
    from kvgate.evals.suites.base import DEFAULT_COUNTS, DEFAULT_DEPTHS
    from kvgate.evals.suites.catalog import suite_class

    counts = choice.counts or DEFAULT_COUNTS
    tasks = suite_class(choice.name)().chosen(choice.tasks)
    return sum(counts.values()) * len(tasks), len(counts) * len(choice.depths or DEFAULT_DEPTHS)
