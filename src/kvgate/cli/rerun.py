"""``kvgate rerun``: cells of a finished run, made again and compared."""

from __future__ import annotations

import argparse
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgate.cli.numbers import MOST_SEED, real, whole
from kvgate.cli.output import DONE, NOT_PASSED

if TYPE_CHECKING:
    from kvgate.evals.run.rerun import Comparison, Wanted

_DESCRIPTION = """\
Makes cells of a finished run again from its folder alone and compares them with its samples: byte for byte on a machine
like the recorded one; on another, where sums round differently, by scores and verdicts, and says what differs.

  kvgate rerun results/quick --policy h2o@0.5          the first batch of every suite
  kvgate rerun results/quick --policy h2o@0.5 --all    the whole row
  kvgate rerun results/quick --share 0.05 --attach     a random twentieth of all rows, kept as evidence in rerun.json

exit codes: 0 the same, 1 a difference (the first is shown), 2 not comparable: another model, code or version
"""


def add_parser(subparsers: Any) -> None:
    """Add ``rerun`` to an argparse subparsers object."""
    parser = subparsers.add_parser(
        "rerun", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="results folder")
    parser.add_argument("--policy", help="policy@budget label of the leaderboard (with --share: default all)")
    parser.add_argument("--protocol", help="only this protocol (default: all the policy was run under)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--unit", type=whole(0, 1_000_000_000), help="only this batch")
    which.add_argument("--all", action="store_true", help="every batch (default: the first of every suite)")
    which.add_argument("--share", type=real(1e-9, 1), help="this share of the batches, drawn at random")
    parser.add_argument("--seed", type=whole(0, MOST_SEED), help="with --share: draw by it (default: a new one)")
    parser.add_argument("--attach", action="store_true", help="with --share: keep the result beside the run")
    parser.add_argument("--anyway", action="store_true", help="compare although model, code or versions differ")
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Compare and say so. ValueError for a row that is not there or cannot be compared."""
    from kvgate.evals.leaderboard.evidence import attach
    from kvgate.evals.run.rerun import Wanted, record_of, rerun

    if args.policy is None and args.share is None:
        raise ValueError("--policy: name the row to make again, or give --share to draw from all")
    if args.share is None and (args.seed is not None or args.attach):
        raise ValueError("--seed and --attach belong to --share; add it")
    if args.attach and (args.policy or args.protocol or args.anyway):
        raise ValueError("--attach: evidence is drawn from all rows; leave --policy, --protocol and --anyway out")

    def report(done: int, total: int) -> None:
        print(f"batch {done + 1} of {total}", file=sys.stderr)

    # A forger must not know which cells will be made again.
    seed = secrets.randbits(32) if args.seed is None else args.seed
    wanted = Wanted(args.policy, args.protocol, args.unit, args.all, args.share, seed)
    found = rerun(args.results, wanted, anyway=args.anyway, report=report)
    _show(wanted, found)
    if args.attach:
        print(attach(args.results, record_of(args.results, wanted, found)))
    return DONE if found.agrees else NOT_PASSED


def _show(wanted: Wanted, found: Comparison) -> None:
    name = wanted.label or f"share {wanted.share:g} of all rows, seed {wanted.seed}"
    for note in found.notes:
        print(f"note: {note}")
    if found.elsewhere:
        print(f"another machine, so scores and verdicts are compared: {'; '.join(found.elsewhere)}")
        print(f"{name}: {found.cells} cells of {found.units} batches made again: {found.answers} answers and "
              f"{found.scores} scores differ")  # fmt: skip
    for change in found.verdicts:
        print(f"{name}: {change}")
    if found.difference is not None:
        print(f"{name}: {found.difference}")
    elif not found.elsewhere:
        rest = found.available - found.units
        more = f"; {rest} more batches hold this row, --all compares them" if rest and wanted.label else ""
        print(f"{name}: {found.cells} cells of {found.units} batches made again, all as recorded{more}")
