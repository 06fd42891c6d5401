"""``kvgate lm-eval``: any lm-eval task, exact and under policies, with a verdict."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgate.cli.numbers import whole

if TYPE_CHECKING:
    from kvgate.evals.plan.config import RunConfig

_DESCRIPTION = """\
Runs lm-eval tasks with the exact cache and under policies, pairs documents by lm-eval's own hashes, and judges them.
The prompt is evicted with the question in it, its last token held back. The results folder is one that show, gate and
canary read.

  kvgate lm-eval --tasks arc_easy,gsm8k --policy h2o@0.5,0.25 --limit 200 --out results/lm-eval
  kvgate lm-eval --tasks my_task --include-path my_tasks --policy streaming_llm@512
"""


def add_parser(subparsers: Any) -> None:
    """Add ``lm-eval`` to an argparse subparsers object."""
    parser = subparsers.add_parser(
        "lm-eval",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tasks", required=True, help="task names, separated by commas")
    parser.add_argument("--policy", action="append", required=True, metavar="NAME@BUDGET[,BUDGET]")
    parser.add_argument("--model", default="embedded", help="hub id, folder, or 'embedded'")
    parser.add_argument("--revision", help="hub revision of the model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--gate", default="screen", help="gate name or YAML file (default: screen)")
    parser.add_argument("--include-path", type=Path, help="folder with task YAML files of your own")
    parser.add_argument("--limit", type=whole(1, 1_000_000_000), help="first documents of each task (default: all)")
    parser.add_argument(
        "--num-fewshot", type=whole(0, 100_000), help="examples in the prompt (default: the task's own)"
    )
    parser.add_argument("--metric", help="NAME or NAME,FILTER (default: the task's first that is better when higher)")
    parser.add_argument("--apply-chat-template", action="store_true", help="use the model's chat template")
    parser.add_argument("--batch-rows", type=whole(2, 65536), default=48, help="most rows side by side (48)")
    parser.add_argument("--out", type=Path, default=Path("results/lm-eval"), help="results folder")
    parser.add_argument("--enforce", action="store_true", help="exit 1 unless every policy row is enabled")
    parser.add_argument("--json", action="store_true", help="print the leaderboard as JSON instead of tables")
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Run, write and show. ValueError for bad input."""
    from kvgate.evals.lm_eval.run import LmEvalOptions, run_lm_eval
    from kvgate.evals.report.tables import print_leaderboard, stdout_console

    board = run_lm_eval(_config(args), _options(args, LmEvalOptions), args.out, _reporter(args.json))
    if args.json:
        print(json.dumps(board, indent=1, sort_keys=True, ensure_ascii=False))
    else:
        print_leaderboard(board, stdout_console())
        print(f"\nleaderboard: {args.out / 'leaderboard.json'}   every answer: {args.out / 'samples.jsonl'}")
    passed = all(row["status"] == "enable" for row in board["rows"])
    return 1 if args.enforce and not passed else 0


def _config(args: argparse.Namespace) -> RunConfig:
    from kvgate.evals.plan.config import RunConfig, SuiteChoice, parse_policy, policy_entry

    names = list(dict.fromkeys(name.strip() for name in args.tasks.split(",") if name.strip()))
    if not names:
        raise ValueError(f"--tasks {args.tasks!r}: name at least one task")
    if args.batch_rows < 2:
        raise ValueError(f"--batch-rows {args.batch_rows}: give at least 2")
    return RunConfig(
        name=args.out.name,
        suites=tuple(SuiteChoice(name) for name in names),
        policies=tuple(parse_policy(policy_entry(text), "--policy") for text in args.policy),
        model=args.model,
        revision=args.revision,
        dtype=args.dtype,
        gate=args.gate,
        batch_rows=args.batch_rows,
    )


def _options(args: argparse.Namespace, kind: Any) -> Any:
    for name, least in (("limit", 1), ("num_fewshot", 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} {value}: give at least {least}")
    return kind(args.include_path, args.limit, args.num_fewshot, args.apply_chat_template, args.metric)


def _reporter(quiet: bool) -> Any:
    """A line on standard error whenever a batch is done."""
    return (lambda cells: None) if quiet else lambda cells: print(f"{cells} requests answered", file=sys.stderr)
