"""``kvgate verify``: a finished run, built and scored again from its plan."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgate.cli.output import DONE, NOT_PASSED

if TYPE_CHECKING:
    from kvgate.evals.leaderboard.finished import FinishedRun
    from kvgate.evals.log.verification import Verification

_DESCRIPTION = """\
Builds the items of a finished run again from its plan and scores every recorded answer again. Needs the tokenizer, not
the weights. What only the model can say, that it gave these answers, is what `kvgate rerun --share` checks.

exit codes: 0 all as recorded, 1 something is not (each fault is a line), 2 unreadable, edited, or not buildable here
"""


def add_parser(commands: Any) -> None:
    """Add the command to an argparse subparsers object."""
    parser = commands.add_parser(
        "verify", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="results folder")
    parser.add_argument(
        "--include-path", type=Path, help="of a run of lm-eval's tasks: folder with task files of your own"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=main)


def verified(run: FinishedRun, include_path: Path | None) -> Verification:
    """The verification of a run, whoever makes its items. ValueError if it cannot be built again here."""
    from kvgate.evals.lm_eval.items import MADE_BY

    if any(MADE_BY in suite["options"] for suite in run.manifest["plan"]["suites"]):
        from kvgate.evals.lm_eval.verify import verify_lm_eval

        return verify_lm_eval(run, include_path)
    from kvgate.evals.run.verify import verify

    return verify(run)


def main(options: argparse.Namespace) -> int:
    """Verify and say so. ValueError for a folder that cannot be read or whose plan cannot be built."""
    from kvgate.evals.leaderboard.finished import load_run

    found = verified(load_run(options.results), options.include_path)
    if options.json:
        print(json.dumps({**asdict(found), "passed": found.passed}, indent=1, sort_keys=True))
        return DONE if found.passed else NOT_PASSED
    for note in found.notes:
        print(f"note: {note}")
    for fault in found.faults:
        print(f"fault: {fault}")
    if found.more:
        print(f"and {found.more} more")
    if found.passed:
        print(
            f"{found.items} items built and {found.cells} answers scored again, all as recorded; seal {found.head[:16]}"
        )
    return DONE if found.passed else NOT_PASSED
