"""``kvgate show``: a finished run's leaderboard as it was written."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kvgate.cli.output import DONE, print_board


def add_parser(commands: Any) -> None:
    """Add the command to an argparse subparsers object."""
    parser = commands.add_parser("show", description="Show a finished run's leaderboard.")
    parser.add_argument("results", type=Path, help="results folder")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=main)


def main(options: argparse.Namespace) -> int:
    """Show it. ValueError where there is none."""
    from kvgate.evals.leaderboard.finished import stored_leaderboard

    print_board(stored_leaderboard(options.results), as_json=options.json, reasons=True)
    return DONE
