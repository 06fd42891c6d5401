"""``kvgate canary``: the canary config of an enabled policy, or why there is none."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgate.cli.output import DONE, NOT_PASSED

if TYPE_CHECKING:
    from kvgate.evals.leaderboard.finished import FinishedRun
    from kvgate.evals.log.verification import Verification


def add_parser(commands: Any) -> None:
    """Add the command to an argparse subparsers object."""
    parser = commands.add_parser(
        "canary",
        description="Verify the run (see kvgate verify) and emit a canary config, or say why not.",
    )
    parser.add_argument("results", type=Path, help="results folder")
    parser.add_argument("--policy", required=True, help="policy@budget label of the leaderboard")
    parser.add_argument("--protocol", help="only this protocol (default: all the policy was run under)")
    parser.add_argument("--gate", help="gate name or YAML file (default: the run's own)")
    parser.add_argument("--out", type=Path, help="folder for the YAML (default: <results>/canary)")
    parser.add_argument(
        "--include-path", type=Path, help="of a run of lm-eval's tasks: folder with your own task files"
    )
    parser.set_defaults(run=main)


def main(options: argparse.Namespace) -> int:
    """Write it and print its path. ValueError for a run or policy that is not there."""
    from kvgate.cli.verify import verified
    from kvgate.evals.leaderboard.canary import NotEnabled, write_canary
    from kvgate.evals.leaderboard.finished import load_run

    run = load_run(options.results)
    folder = options.out or options.results / "canary"

    def check(run: FinishedRun) -> Verification:
        return verified(run, options.include_path)

    try:
        path = write_canary(run, options.policy, folder, check, options.protocol, options.gate)
    except NotEnabled as refusal:
        print(f"kvgate: no canary: {refusal}", file=sys.stderr)
        return NOT_PASSED
    print(path)
    return DONE
