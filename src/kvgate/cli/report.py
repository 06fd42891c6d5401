"""``kvgate report``: write a finished run's page and figures."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Add ``report`` to an argparse subparsers object; the parsed arguments carry ``run``, which is :func:`main`."""
    parser = subparsers.add_parser(
        "report",
        description="Writes index.html (self-contained: no network, no script), figures/*.png and *.svg, and "
        "examples.json. Verdicts are made again from the samples.",
    )
    parser.add_argument("results", type=Path, help="results folder")
    parser.add_argument("--out", type=Path, help="folder of the report (default: <results>/report)")
    parser.add_argument("--gate", help="gate name or YAML file (default: the run's own)")
    parser.set_defaults(run=main)


def main(options: argparse.Namespace) -> int:
    """Write the report and say where it is. ValueError for a run or folder that cannot be used."""
    # Here, so that the other commands do not wait for torch.
    from kvgate.evals.leaderboard.finished import load_run
    from kvgate.evals.report.build import write_report

    out = options.out or options.results / "report"
    print(write_report(load_run(options.results), out, options.gate))
    return 0
