"""``kvgate canary``: the canary config of an enabled policy, or why there is none."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from kvgate.cli.output import DONE, NOT_PASSED


def add_parser(commands: Any) -> None:
    """Add the command to an argparse subparsers object."""
    parser = commands.add_parser(
        "canary",
        description="Emit a canary config, or say why not.",
    )
    parser.add_argument("results", type=Path, help="results folder")
    parser.add_argument("--policy", required=True, help="policy@budget label of the leaderboard")
    parser.add_argument("--protocol", help="only this protocol (default: all the policy was run under)")
    parser.add_argument("--gate", help="gate name or YAML file (default: the run's own)")
    parser.add_argument("--out", type=Path, help="folder for the YAML (default: <results>/canary)")
    parser.set_defaults(run=main)


def main(options: argparse.Namespace) -> int:
    """Write it and print its path. ValueError for a run or policy that is not there."""
    from kvgate.evals.leaderboard.canary import NotEnabled, write_canary
    from kvgate.evals.leaderboard.finished import load_run

    run = load_run(options.results)
    try:
        path = write_canary(
            run, options.policy, options.out or options.results / "canary", options.protocol, options.gate
        )
    except NotEnabled as refusal:
        print(f"kvgate: no canary: {refusal}", file=sys.stderr)
        return NOT_PASSED
    print(path)
    return DONE
