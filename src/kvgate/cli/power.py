"""``kvgate power``: items a gate needs."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

from kvgate.cli.numbers import real, whole
from kvgate.evals.judge.gates import load_gate
from kvgate.evals.judge.power import GatePower, Population, gate_power
from kvgate.evals.report.tables import stdout_console


def add_parser(subparsers: Any) -> None:
    """Add ``power`` to an argparse subparsers object; the parsed arguments carry ``run``, which is :func:`main`."""
    parser = subparsers.add_parser(
        "power",
        description="Simulates a policy without any true loss and says how many items a suite needs so that it passes.",
    )
    add_options(parser)
    parser.add_argument("--gate", default="production", help="gate name or YAML file")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=main)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that describe the policy and the plan; for ``kvgate plan --power`` too."""
    parser.add_argument("--discordance", type=real(0, 1), default=0.05, help="share of items whose score differs (.05)")
    parser.add_argument("--cluster-size", type=whole(1, 1_000_000), default=1, help="items that share a context (1)")
    parser.add_argument("--suites", type=whole(1, 1000), default=3, help="suites of the plan (3)")
    parser.add_argument("--slices", type=whole(1, 100_000), default=9, help="slices of each suite (9)")
    parser.add_argument(
        "--families", type=whole(1, 1000), default=1, help="policies and protocols that share the gate's alpha (1)"
    )
    parser.add_argument(
        "--power", type=real(0, 1, inside=True), default=0.9, help="chance that a lossless policy passes (.9)"
    )
    parser.add_argument("--cap", type=whole(1, 10_000_000), default=20_000, help="most items to consider (20000)")


def main(args: argparse.Namespace) -> int:
    """Print the answer. ValueError for input that makes no sense."""
    gate = load_gate(args.gate)
    population = Population(0.0, args.discordance, cluster_size=args.cluster_size)
    found = gate_power(
        gate, population, suites=args.suites, slices=args.slices, families=args.families, power=args.power, cap=args.cap
    )
    if args.json:
        print(json.dumps(asdict(found), sort_keys=True))
    else:
        stdout_console().print("\n".join(describe(found, args)), highlight=False)
    return 0


def describe(found: GatePower, args: argparse.Namespace) -> list[str]:
    """The answer in sentences."""
    lines = [
        f"gate {args.gate}, {args.discordance:.1%} of pairs differing, no true loss, chance of passing {args.power:.0%}"
        + (f", alpha shared by {args.families} families" if args.families > 1 else "")
    ]
    for what, need in (("suite", found.suite), ("slice", found.slice)):
        if need is None:
            continue
        fixed = "more than the cap" if need.fixed is None else f"{need.fixed}"
        lines.append(
            f"each {what} at margin {need.margin:g}: {fixed} items; {need.mean:.0f} on average when run until decided"
        )
    total = f"more than {args.cap}" if found.items is None else f"{found.items}"
    lines.append(f"items a suite, with {args.suites} suites of {args.slices} slices: {total}")
    return lines
