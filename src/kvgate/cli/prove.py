"""``kvgate prove``: measure the gate's own error rates."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from kvgate.cli.numbers import MOST_SEED, real, whole
from kvgate.evals.judge.gates import load_gate
from kvgate.evals.judge.simulated_rows import RowResult, at_alpha, row_cases, run_row
from kvgate.evals.judge.simulation import CaseResult, Settings, cases, run_case
from kvgate.evals.judge.simulation_report import Requirement, report, requirements
from kvgate.evals.report.tables import stdout_console

_DEFAULT = Settings()


def add_parser(subparsers: Any) -> None:
    """Add ``prove`` to an argparse subparsers object; the parsed arguments carry ``run``, which is :func:`main`."""
    parser = subparsers.add_parser(
        "prove",
        description="Simulates policies whose true loss is known (at the margin, above it, zero), looks after every "
        "batch, and reports false enables, false blocks, power and mean items. Writes prove.json and prove.png. "
        "Exit 0 when every requirement is met, 1 otherwise, 2 for bad input.",
    )
    parser.add_argument("--out", type=Path, default=Path("results/prove"), help="folder for prove.json and prove.png")
    parser.add_argument(
        "--replicates", type=whole(1, 1_000_000), default=_DEFAULT.replicates, help="simulated runs a case"
    )
    parser.add_argument("--cap", type=whole(1, 1_000_000), default=_DEFAULT.cap, help="most items of a run")
    parser.add_argument("--batch", type=whole(1, 1_000_000), default=_DEFAULT.batch, help="items between two looks")
    parser.add_argument(
        "--alpha", type=real(0, 0.5, inside=True), default=_DEFAULT.alpha, help="error rate of the gate"
    )
    parser.add_argument("--gate", default="production", help="gate name or YAML file that judges the rows (production)")
    parser.add_argument("--seed", type=whole(0, MOST_SEED), default=_DEFAULT.seed, help="seed of all random numbers")
    parser.add_argument("--json", action="store_true", help="print the report as JSON instead of tables")
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run the simulation. ValueError for settings that make no sense, before anything is written."""
    from kvgate.evals.judge.simulation_plot import draw  # here, so that other commands do not wait for matplotlib

    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--out {str(args.out)!r:.200}: cannot be made: {error!s:.100}; name another folder"
        ) from error
    settings = Settings(args.replicates, args.alpha, args.batch, args.cap, args.seed)
    gate = at_alpha(load_gate(args.gate), settings.alpha)
    errors = Console(stderr=True)
    results = [
        run_case(case, settings, stream)
        for stream, case in enumerate(track(cases(), description="cases", console=errors, transient=True))
    ]
    rows = [
        run_row(case, settings, stream, gate)
        for stream, case in enumerate(track(row_cases(gate), description="rows", console=errors, transient=True))
    ]
    required = requirements(results, rows, settings)
    document = report(results, rows, required, settings)
    _write(args.out / "prove.json", json.dumps(document, indent=1, sort_keys=True) + "\n")
    draw(results, settings, args.out / "prove.png")
    if args.json:
        print(json.dumps(document, sort_keys=True))
    else:
        _show(stdout_console(), results, rows, required)
    return 0 if all(entry.met for entry in required) else 1


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _show(console: Console, results: list[CaseResult], rows: list[RowResult], required: list[Requirement]) -> None:
    table = Table(title="single suites, right-or-wrong items in clusters of 1; prove.json has all cases")
    for name in (
        "margin",
        "discordance",
        "true loss",
        "enabled",
        "upper 95 %",
        "blocked",
        "mean items",
        "t-test",
    ):
        table.add_column(name, justify="right")
    for entry in results:
        case = entry.case
        if case.kind == "binary" and case.cluster_size == 1:
            table.add_row(
                f"{case.margin:g}",
                f"{entry.differing:.3g}",
                f"{entry.loss:.3g}",
                f"{entry.enabled:.4f}",
                f"{entry.enabled_upper:.4f}",
                f"{entry.blocked:.4f}",
                f"{entry.mean_items:.0f}",
                f"{entry.t_enabled:.3f}",
            )
    console.print(table)
    table = Table(title="rows of 3 suites with 4 slices each, judged by the gate as a run is")
    for name in ("row", "enabled", "upper", "blocked", "upper", "items"):
        table.add_column(name)
    for row in rows:
        table.add_row(
            row.name,
            f"{row.enabled:.4f}" + (" (error)" if row.enable_is_error else ""),
            f"{row.enabled_upper:.4f}",
            f"{row.blocked:.4f}" + (" (error)" if row.block_is_error else ""),
            f"{row.blocked_upper:.4f}",
            f"{row.mean_items:.0f}",
        )
    console.print(table)
    for need in required:
        mark = "met   " if need.met else "MISSED"
        console.print(f"{mark} {need.text}: {need.measured:.4g} (limit {need.limit:g})")
