"""``kvgate canary``: the canary config of an enabled policy, or why there is none; and rollouts under way."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgate.cli import canary_orders
from kvgate.cli.canary_orders import ACTIONS
from kvgate.cli.formats import FORMATS
from kvgate.cli.output import DONE, NOT_PASSED

if TYPE_CHECKING:
    from kvgate.evals.leaderboard.finished import FinishedRun
    from kvgate.evals.log.verification import Verification

_DESCRIPTION = """\
Verifies the run (see kvgate verify) and emits a canary config, or says why not. `kvgate serve --canary` carries it
out; its rollout is seen and steered from outside:

  kvgate canary results/run --policy 'h2o@0.75'
  kvgate canary results/run/canary/h2o-0.75.yaml --format argo
  kvgate canary status results/run/canary/h2o-0.75.state
  kvgate canary promote | rollback | history results/run/canary/h2o-0.75.state
"""


def add_parser(commands: Any) -> None:
    """Add the command to an argparse subparsers object."""
    parser = commands.add_parser(
        "canary",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("results", type=Path, help=f"results folder, or one of: {', '.join(ACTIONS)}")
    parser.add_argument("state", type=Path, nargs="?", help="of an action: folder of the rollout's journal")
    parser.add_argument("--policy", help="policy@budget label of the leaderboard")
    parser.add_argument("--protocol", help="only this protocol (default: all the policy was run under)")
    parser.add_argument("--gate", help="gate name or YAML file (default: the run's own)")
    parser.add_argument("--out", type=Path, help="folder for the YAML (default: <results>/canary)")
    parser.add_argument(
        "--include-path", type=Path, help="of a run of lm-eval's tasks: folder with your own task files"
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        help="write what this rollout tool takes instead; of a run, or of a canary config (.yaml) already emitted",
    )
    parser.add_argument("--why", help="of promote and rollback: the reason, for the audit")
    parser.add_argument("--json", action="store_true", help="of status: as JSON")
    parser.set_defaults(run=main)


def main(options: argparse.Namespace) -> int:
    """Write it and print its path. ValueError for a run or policy that is not there."""
    if options.state is not None:
        if str(options.results) not in ACTIONS:
            raise ValueError(f"action {str(options.results)!r} is unknown; use one of {', '.join(ACTIONS)}")
        return canary_orders.main(options)
    if str(options.results) in ACTIONS and not options.results.is_dir():
        raise ValueError(f"{options.results}: name the folder of the rollout's journal")
    if options.format is not None and options.results.suffix in (".yaml", ".yml"):
        return _convert(options.results, options.format, options.out)
    if options.policy is None:
        raise ValueError("--policy: name a policy@budget label of the leaderboard")
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
    return DONE if options.format is None else _convert(path, options.format, options.out)


def _convert(path: Path, format: str, out: Path | None) -> int:
    """Write a canary config as a rollout tool takes it, beside it or into ``out``; prints the paths."""
    from kvgate.evals.log.run_folder import write_text, writing
    from kvgate.serving.canary.settings import load_canary
    from kvgate.serving.rollout.formats import render

    folder = out or path.parent
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for name, text in render(load_canary(path), format).items():
        write_text(folder / name, text)
        print(folder / name)
    return DONE
