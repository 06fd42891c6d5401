"""``kvgate rerun``: a row of a leaderboard, made again and compared byte for byte."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from kvgate.cli.numbers import whole

_DESCRIPTION = """\
Makes cells of a leaderboard row again from the results folder alone and compares them, byte for byte, with its samples.

  kvgate rerun results/quick --policy h2o@0.5          the first batch of every suite
  kvgate rerun results/quick --policy h2o@0.5 --all    the whole row

exit codes: 0 the same, 1 a difference (the first is shown), 2 not comparable: another model, code or version
"""


def add_parser(subparsers: Any) -> None:
    """Add ``rerun`` to an argparse subparsers object."""
    parser = subparsers.add_parser(
        "rerun",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("results", type=Path, help="results folder")
    parser.add_argument("--policy", required=True, help="policy@budget label of the leaderboard")
    parser.add_argument("--protocol", help="only this protocol (default: all the policy was run under)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--unit", type=whole(0, 1_000_000_000), help="only this batch")
    which.add_argument("--all", action="store_true", help="every batch (default: the first of every suite)")
    parser.add_argument("--anyway", action="store_true", help="compare although model, code or versions differ")
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Compare and say so. ValueError for a row that is not there or cannot be compared."""
    from kvgate.evals.run.rerun import Wanted, rerun

    def report(done: int, total: int) -> None:
        print(f"batch {done + 1} of {total}", file=sys.stderr)

    wanted = Wanted(args.policy, args.protocol, args.unit, args.all)
    found = rerun(args.results, wanted, anyway=args.anyway, report=report)
    for note in found.notes:
        print(f"note: {note}")
    if found.difference is not None:
        print(f"{args.policy}: {found.difference}")
        return 1
    rest = found.available - found.units
    more = f"; {rest} more batches hold this row, --all compares them" if rest else ""
    print(f"{args.policy}: {found.cells} cells of {found.units} batches made again, all as recorded{more}")
    return 0
