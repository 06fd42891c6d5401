"""``kvgate plan``: what a plan would run, and whether its items can pass its gate."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvgate.cli.numbers import real, whole
from kvgate.cli.power import describe
from kvgate.evals.judge.columns import SliceKey
from kvgate.evals.judge.gates import Gate, load_gate
from kvgate.evals.judge.power import GatePower, Population, gate_power

if TYPE_CHECKING:
    from kvgate.evals.plan.config import RunConfig, SuiteChoice


def add_parser(subparsers: Any) -> None:
    """Add ``plan`` to an argparse subparsers object."""
    parser = subparsers.add_parser(
        "plan",
        description="Shows a plan without loading its model. With --power, simulates a policy without any true loss "
        "and says how many items a suite needs so that it passes the plan's gate.",
    )
    parser.add_argument("plan", nargs="?", default="quick", help="plan name or YAML file (quick)")
    parser.add_argument("--gate", help="gate name or YAML file (default: the plan's)")
    parser.add_argument(
        "--power", type=real(0, 1, inside=True), nargs="?", const=0.9, help="wanted chance to pass (.9 if left out)"
    )
    parser.add_argument("--discordance", type=real(0, 1), default=0.05, help="share of items whose score differs (.05)")
    parser.add_argument("--cluster-size", type=whole(1, 1_000_000), default=1, help="items that share a context (1)")
    parser.add_argument("--cap", type=whole(1, 10_000_000), default=20_000, help="most items to consider (20000)")
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Print the plan. ValueError for input that makes no sense."""
    from kvgate.evals.plan.cells import configurations
    from kvgate.evals.plan.config import load_plan

    config = load_plan(args.plan, {"gate": args.gate} if args.gate is not None else None)
    gate = load_gate(config.gate)
    found = configurations(config)
    sizes = {choice.name: slice_sizes(choice, gate, ("length", "depth")) for choice in config.suites}
    print(f"plan {config.name}: model {config.model}, gate {gate.name}, seed {config.seed}")
    for name, made in sizes.items():
        print(f"  {name:16} about {sum(made)} items, {len(made)} (length, depth) slices of {min(made)} or more")
    cells = sum(map(sum, sizes.values())) * len(found)
    print(
        f"  {len(found)} rows an item: {', '.join(configuration.label for configuration in found)}; about {cells} cells"
    )
    if args.power is None:
        return 0
    judged = {choice.name: [slice_sizes(choice, gate, keys) for keys in gate.groupings] for choice in config.suites}
    slices = max(sum(map(len, cut)) for cut in judged.values()) or 1
    finest = max((len(made) for cut in judged.values() for made in cut), default=1)
    shared = families(config)
    needed = argparse.Namespace(
        gate=gate.name, discordance=args.discordance, power=args.power, cap=args.cap, suites=len(sizes), slices=slices,
        families=shared,
    )  # fmt: skip
    population = Population(0.0, args.discordance, cluster_size=args.cluster_size)
    answer = gate_power(
        gate, population, suites=len(sizes), slices=slices, finest=finest, families=shared, power=args.power,
        cap=args.cap,
    )  # fmt: skip
    print("\n".join(describe(answer, needed)))
    for name, cut in judged.items():
        print(f"  {name:16} {_enough(sum(sizes[name]), cut, answer, gate, args.cluster_size)}")
    return 0


def families(config: RunConfig) -> int:
    """Families of policies, each under each protocol of the plan's suites, that share the gate's alpha."""
    from kvgate.evals.plan.cells import configurations
    from kvgate.evals.suites.catalog import suite_class

    if config.primary is not None:
        return 1
    found = {
        (configuration.name, str(sorted(configuration.params.items())))
        for configuration in configurations(config)[1:]
        if not configuration.oracle
    }
    protocols = {choice.protocol or suite_class(choice.name).protocol for choice in config.suites}
    return max(1, len(found) * len(protocols))


def _enough(items: int, cut: Sequence[Sequence[int]], answer: GatePower, gate: Gate, cluster_size: int) -> str:
    """Whether a suite's items, and those of its smallest slice, are as many as the simulation asks for.

    A suite of few slices needs fewer items than the total for the plan's most finely sliced one.
    """
    wanted = [(items, answer.suite.fixed, max(gate.min_items, gate.min_clusters * cluster_size), "items")]
    if answer.slice is not None and cut:
        least = gate.min_slice_clusters * cluster_size
        wanted.append((min(map(min, cut)), answer.slice.fixed, least, "in its smallest slice"))
    short, said = False, []
    for has, fixed, least, what in wanted:
        need = None if fixed is None else max(fixed, least)
        short |= need is None or has < need
        said.append(f"{has} of {'more than the cap' if need is None else need} {what}")
    return f"{', '.join(said)}: {'too few' if short else 'enough'}"


def slice_sizes(choice: SuiteChoice, gate: Gate, keys: Sequence[SliceKey]) -> list[int]:
    """Items asked for in each slice by ``keys``, smallest first; items without a depth are slices of their own.

    Depths are dealt out as :class:`~kvgate.evals.suites.base.Generated` does it. Suites whose items share contexts, or
    that take a depth from their source, differ a little; a suite that cannot fill a slice makes fewer.
    """
    from kvgate.evals.suites.base import DEFAULT_COUNTS, DEFAULT_DEPTHS
    from kvgate.evals.suites.catalog import suite_class

    suite = suite_class(choice.name)
    depths = choice.depths or DEFAULT_DEPTHS
    sizes: Counter[tuple[object, ...]] = Counter()
    for task in suite().chosen(choice.tasks):
        rank = list(suite.tasks).index(suite.twins.get(task, task))
        placed = suite.has_depth(task)
        for length, count in (choice.counts or DEFAULT_COUNTS).items():
            for index in range(count):
                depth = gate.depth_bin(depths[(index + rank) % len(depths)]) if placed else None
                values = {"task": task, "length": length, "depth": depth}
                sizes[tuple(values[key] for key in keys)] += 1
    return sorted(sizes.values()) or [0]
