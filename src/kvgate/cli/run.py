"""``kvgate run``: a plan in, a judged results folder out; resumable."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from kvgate.cli.numbers import MOST_SEED, real, whole
from kvgate.cli.output import enforced, print_board


def add_parser(commands: Any) -> None:
    """Add the command to an argparse subparsers object."""
    parser = commands.add_parser("run", description="Run a plan; resumable.")
    parser.add_argument("--plan", default="quick", help="plan name or YAML file (default: quick)")
    parser.add_argument("--out", type=Path, help="results folder (default: results/<plan name>)")
    parser.add_argument("--model", help="hub id, folder, or 'embedded' (default: the plan's)")
    parser.add_argument("--revision", help="hub revision of the model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="weights and cache")
    parser.add_argument(
        "--numerics", choices=("fast", "batch", "order", "portable"),
        help="what rounding may depend on: anything; not on who else is in the batch (default in bfloat16); nor on how "
        "tokens are fed; the same in float32",
    )  # fmt: skip
    parser.add_argument("--seed", type=whole(0, MOST_SEED), help="seed of the items")
    parser.add_argument("--seeds", metavar="N,N,...", help="several seeds of the items in one run with one verdict")
    parser.add_argument("--primary", metavar="LABEL", help="the one row that may be enabled, at the gate's whole alpha")
    parser.add_argument("--gate", help="gate name or YAML file (default: the plan's)")
    parser.add_argument(
        "--policy", action="append", metavar="NAME@BUDGET[,BUDGET]",
        help="instead of the plan's policies: a policy name, configs/policies name or module:Class, with budgets; "
        "may be given several times, for example h2o@0.5,0.25 or mine.policies:Mine@512",
    )  # fmt: skip
    parser.add_argument("--until-decided", action="store_true", help="stop as soon as no verdict is open")
    parser.add_argument(
        "--max-items", type=whole(1, 1_000_000_000), help="with --until-decided: run at most this many items"
    )
    parser.add_argument(
        "--max-minutes",
        type=real(0, 1e9, inside=True),
        help="with --until-decided: begin no further round after this long",
    )
    parser.add_argument("--enforce", action="store_true", help="exit 1 unless every policy row is enabled")
    parser.add_argument("--json", action="store_true", help="print the leaderboard as JSON instead of tables")
    parser.set_defaults(run=main)


def main(options: argparse.Namespace) -> int:
    """Run, write and show. ValueError for bad input."""
    from kvgate.cli.progress import watched
    from kvgate.evals.plan.config import load_plan, policy_entry
    from kvgate.evals.run.execute import execute
    from kvgate.evals.run.prepare import prepare

    keys = ("model", "revision", "dtype", "numerics", "seed", "gate", "primary")
    overrides: dict[str, Any] = {key: getattr(options, key) for key in keys if getattr(options, key) is not None}
    if options.seeds is not None:
        overrides["seeds"] = _seeds(options.seeds)
    if options.policy:
        overrides["policies"] = [policy_entry(text) for text in options.policy]
    if options.until_decided:
        overrides["until_decided"] = {"items": options.max_items, "minutes": options.max_minutes}
    elif options.max_items is not None or options.max_minutes is not None:
        raise ValueError("--max-items and --max-minutes cap a run with --until-decided; add it")
    config = load_plan(options.plan, overrides)
    out = options.out or Path("results") / config.name
    _writable(out)
    with watched(quiet=options.json) as report:
        board = execute(prepare(config), out, report)
    print_board(board, as_json=options.json, reasons=False)
    if not options.json:
        print(f"\nleaderboard: {out / 'leaderboard.json'}   every answer: {out / 'samples.jsonl'}")
    return enforced(board, options.enforce)


def _seeds(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 20 for part in parts):
        raise ValueError(f"--seeds {text!r:.80}: give whole numbers with commas between, for example 11,12,13")
    return [int(part) for part in parts]


def _writable(out: Path) -> None:
    """Refuse a folder that cannot be written before any time is spent on the model."""
    existing = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ValueError(f"results folder {out}: {existing} cannot be written; choose another with --out")
