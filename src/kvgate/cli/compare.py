"""``kvgate compare``: judge what others run, from two endpoints or from their logs."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgate.cli import endpoints
from kvgate.cli.output import DONE, NOT_PASSED, finite

if TYPE_CHECKING:
    from kvgate.evals.compare.judge import Judgement


def add_parser(commands: Any) -> None:
    """Add the command to an argparse subparsers object."""
    parser = commands.add_parser(
        "compare",
        description="Judges a candidate against an exact run: from two endpoints of OpenAI's protocol (--exact, "
        "--candidate), asked the suites of a plan, or from logs: a CSV or JSONL of pairs (task, item, cluster, "
        "score_exact, score_candidate), or the two sides' logs (CSV or JSONL with a score, lm-eval's samples_*.jsonl "
        "or their folder, inspect_ai's .eval or .json).",
    )
    parser.add_argument(
        "--logs",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="pairs, or the exact log and the candidate's",
    )
    endpoints.add_parser(parser)
    parser.add_argument("--gate", help="gate name or YAML file (production; with endpoints the plan's)")
    parser.add_argument("--floor", type=float, help="another competence floor than the gate's, for hard tasks")
    parser.add_argument("--metric", help="the metric that is judged, where a log has several")
    parser.add_argument("--name", help="what to call the candidate (the file's name)")
    parser.add_argument("--enforce", action="store_true", help="exit 1 unless the candidate is enabled")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=main)


def main(options: argparse.Namespace) -> int:
    """Read or ask, judge, show. ValueError for bad input."""
    if bool(options.logs) == bool(options.exact or options.candidate):
        raise ValueError("compare: give --logs, or --exact and --candidate")
    enabled = _logs(options) if options.logs else endpoints.compare(options)
    return NOT_PASSED if options.enforce and not enabled else DONE


def _logs(options: argparse.Namespace) -> bool:
    from kvgate.evals.compare.judge import judge
    from kvgate.evals.compare.logs import read_logs
    from kvgate.evals.judge.gates import load_gate

    gate = load_gate(options.gate or "production")
    if options.floor is not None:
        gate = replace(gate, floor=options.floor, name=f"{gate.name}, floor {options.floor:g}")
    found = judge(read_logs(options.logs, options.metric), gate, candidate=options.name or options.logs[-1].stem)
    if options.json:
        print(json.dumps(finite(found.to_dict()), indent=1, sort_keys=True, ensure_ascii=False))
    else:
        _show(found)
    return found.enabled


def _show(found: Judgement) -> None:
    from rich.table import Table

    from kvgate.evals.report.tables import stdout_console

    console = stdout_console()
    table = Table(title=f"{found.candidate}: {found.status} by gate {found.gate['name']}")
    for name in ("task", "items", "exact", "candidate", "difference", "95 % limits", "margin", "status"):
        table.add_column(name, justify="left" if name in ("task", "status") else "right")
    for entry in (*found.tasks, found.overall):
        table.add_row(
            str(entry.keys.get("task", entry.name)),
            str(entry.items),
            f"{entry.exact:.3f}",
            f"{entry.policy:.3f}",
            f"{entry.difference:+.3f}",
            f"{entry.lower:+.3f} {entry.upper:+.3f}",
            f"{entry.margin:.2f}",
            entry.status.replace("_", " "),
        )
    console.print(table)
    for reason in found.reasons:
        console.print(f"- {reason}", highlight=False)
    console.print(f"not checked, since pairs do not show it: {', '.join(found.not_checked)}", highlight=False)
