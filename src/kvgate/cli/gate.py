"""``kvgate gate``: a finished run, judged by a gate."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kvgate.cli.output import enforced, print_board


def add_parser(commands: Any) -> None:
    """Add the command to an argparse subparsers object."""
    parser = commands.add_parser("gate", description="Judge a finished run.")
    parser.add_argument("results", type=Path, help="results folder")
    parser.add_argument("--gate", help="gate name or YAML file (default: the run's own)")
    parser.add_argument("--policy", help="only this policy@budget label")
    parser.add_argument("--enforce", action="store_true", help="exit 1 unless every row (or the named one) is enabled")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=main)


def main(options: argparse.Namespace) -> int:
    """Judge and show. ValueError for a run or policy that is not there."""
    from kvgate.evals.leaderboard.finished import load_run

    board = load_run(options.results).leaderboard(options.gate)
    if options.policy:
        board["rows"] = [row for row in board["rows"] if row["label"] == options.policy]
        if not board["rows"]:
            raise ValueError(f"policy {options.policy!r}: not in {options.results}")
    print_board(board, as_json=options.json, reasons=True)
    return enforced(board, options.enforce)
