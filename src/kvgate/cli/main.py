"""The command line. Entry points only: every command lives in its room and is imported when it is asked for."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import kvgate

DONE, NOT_PASSED, BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 130, 141

_DESCRIPTION = """\
Measures KV-cache eviction policies against exact full-KV runs of your model, and decides which may be switched on.

  kvgate run                       the quick plan on the embedded model, about ten minutes on two cores
  kvgate run --model Qwen/Qwen2.5-7B-Instruct --plan full --out results/qwen
  kvgate show results/quick        the leaderboard again, with every reason
  kvgate gate results/quick --gate production --enforce
  kvgate canary results/quick --policy 'h2o@0.75'
"""
_EPILOG = "exit codes: 0 done, 1 the gate was not passed where --enforce asked for it (or no canary), 2 bad input"


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="kvgate", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"kvgate {kvgate.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    _add_run(commands)
    _add_gate(commands)
    _add_canary(commands)
    _add_show(commands)
    _add_policies(commands)
    from kvgate.cli import engine_metrics as metrics_cli
    from kvgate.cli import lm_eval as lm_eval_cli
    from kvgate.cli import plan as plan_cli
    from kvgate.cli import power as power_cli
    from kvgate.cli import prove as prove_cli
    from kvgate.cli import replay as replay_cli
    from kvgate.cli import report as report_cli
    from kvgate.cli import rerun as rerun_cli
    from kvgate.cli import suites as suites_cli

    own = (suites_cli, plan_cli, report_cli, rerun_cli, lm_eval_cli, prove_cli, power_cli)
    for module in (*own, replay_cli, metrics_cli):
        module.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    # Threads that spin while they wait make a shared machine ten times slower; read when torch is imported, below.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        return _flushed(arguments)
    except OSError as error:
        failure = _stdout_failure()
        if failure is None or failure.errno != error.errno:  # a file's or a socket's
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        if isinstance(failure, BrokenPipeError):  # the reader, such as head, has seen enough
            return BROKEN_PIPE
        print(f"kvgate: standard output: {failure.strerror}; send it elsewhere, as in `> FILE`", file=sys.stderr)
        return BAD_INPUT


def _flushed(arguments: Sequence[str] | None) -> int:
    """Run a command; all that it wrote is flushed, here where a failure can still be told."""
    try:
        code = _command(arguments)
    except SystemExit:  # --help and --version
        if sys.stdout is not None:
            sys.stdout.flush()
        raise
    if sys.stdout is not None:
        sys.stdout.flush()
    return code


def _command(arguments: Sequence[str] | None) -> int:
    parser = build_parser()
    options = parser.parse_args(arguments)
    debug = bool(os.environ.get("KVGATE_DEBUG"))
    try:
        if sys.stdout is None:  # and the next file opened would take its place
            raise ValueError("standard output: closed; send it somewhere, as in `> /dev/null`")
        run: Callable[[argparse.Namespace], int] = options.run
        return run(options)
    except ValueError as error:
        if debug:
            raise
        print(f"kvgate: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("\nkvgate: interrupted; run the same command again to go on where it stopped", file=sys.stderr)
        return INTERRUPTED


def _stdout_failure() -> OSError | None:
    """Why standard output takes no more, if so: one more line tells, as an unbuffered stream forgets what failed."""
    try:
        print(flush=True)
    except OSError as error:
        return error
    return None


def _add_run(commands: Any) -> None:
    parser = commands.add_parser("run", help="run a plan and judge it", description="Run a plan; resumable.")
    parser.add_argument("--plan", default="quick", help="plan name or YAML file (default: quick)")
    parser.add_argument("--out", type=Path, help="results folder (default: results/<plan name>)")
    parser.add_argument("--model", help="hub id, folder, or 'embedded' (default: the plan's)")
    parser.add_argument("--revision", help="hub revision of the model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="weights and cache")
    parser.add_argument("--seed", type=int, help="seed of the items")
    parser.add_argument("--gate", help="gate name or YAML file (default: the plan's)")
    parser.add_argument(
        "--policy", action="append", metavar="NAME@BUDGET[,BUDGET]",
        help="instead of the plan's policies: a policy name, configs/policies name or module:Class, with budgets; "
        "may be given several times, for example h2o@0.5,0.25 or mine.policies:Mine@512",
    )  # fmt: skip
    parser.add_argument("--until-decided", action="store_true", help="stop as soon as no verdict is open")
    parser.add_argument("--max-items", type=int, help="with --until-decided: run at most this many items")
    parser.add_argument(
        "--max-minutes", type=float, help="with --until-decided: begin no further round after this long"
    )
    parser.add_argument("--enforce", action="store_true", help="exit 1 unless every policy row is enabled")
    parser.add_argument("--json", action="store_true", help="print the leaderboard as JSON instead of tables")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from kvgate.cli.progress import watched
    from kvgate.evals.plan.config import load_plan, policy_entry
    from kvgate.evals.run.execute import execute, prepare

    keys = ("model", "revision", "dtype", "seed", "gate")
    overrides: dict[str, Any] = {key: getattr(options, key) for key in keys if getattr(options, key) is not None}
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
    _print_board(board, as_json=options.json, reasons=False)
    if not options.json:
        print(f"\nleaderboard: {out / 'leaderboard.json'}   every answer: {out / 'samples.jsonl'}")
    return _enforced(board, options.enforce)


def _writable(out: Path) -> None:
    """Refuse a folder that cannot be written before any time is spent on the model."""
    existing = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ValueError(f"results folder {out}: {existing} cannot be written; choose another with --out")


def _add_gate(commands: Any) -> None:
    parser = commands.add_parser("gate", help="judge a finished run by a gate", description="Judge a finished run.")
    parser.add_argument("results", type=Path, help="results folder")
    parser.add_argument("--gate", help="gate name or YAML file (default: the run's own)")
    parser.add_argument("--policy", help="only this policy@budget label")
    parser.add_argument("--enforce", action="store_true", help="exit 1 unless every row (or the named one) is enabled")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_gate)


def _gate(options: argparse.Namespace) -> int:
    from kvgate.evals.leaderboard.finished import load_run

    board = load_run(options.results).leaderboard(options.gate)
    if options.policy:
        board["rows"] = [row for row in board["rows"] if row["label"] == options.policy]
        if not board["rows"]:
            raise ValueError(f"policy {options.policy!r}: not in {options.results}")
    _print_board(board, as_json=options.json, reasons=True)
    return _enforced(board, options.enforce)


def _add_canary(commands: Any) -> None:
    parser = commands.add_parser(
        "canary",
        help="emit the canary config of an enabled policy",
        description="Emit a canary config, or say why not.",
    )
    parser.add_argument("results", type=Path, help="results folder")
    parser.add_argument("--policy", required=True, help="policy@budget label of the leaderboard")
    parser.add_argument("--protocol", help="only this protocol (default: all the policy was run under)")
    parser.add_argument("--gate", help="gate name or YAML file (default: the run's own)")
    parser.add_argument("--out", type=Path, help="folder for the YAML (default: <results>/canary)")
    parser.set_defaults(run=_canary)


def _canary(options: argparse.Namespace) -> int:
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


def _add_show(commands: Any) -> None:
    parser = commands.add_parser("show", help="show a finished run", description="Show a finished run's leaderboard.")
    parser.add_argument("results", type=Path, help="results folder")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_show)


def _show(options: argparse.Namespace) -> int:
    from kvgate.evals.leaderboard.finished import stored_leaderboard

    _print_board(stored_leaderboard(options.results), as_json=options.json, reasons=True)
    return DONE


def _add_policies(commands: Any) -> None:
    parser = commands.add_parser(
        "policies", help="list the policies", description="List the policies that can be named."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_policies)


def _policies(options: argparse.Namespace) -> int:
    from kvgate.compressors.catalog import catalog, parameters

    found: dict[str, Any] = {
        name: {
            "about": (policy.__doc__ or "").strip().splitlines()[0],
            "parameters": {key: value.default for key, value in parameters(policy).items() if key != "params"},
        }
        for name, policy in sorted(catalog().items())
    }
    if options.json:
        print(json.dumps(found, indent=1))
        return DONE
    for name, entry in found.items():
        print(f"{name:16} {entry['about']}")
        for key, default in entry["parameters"].items():
            print(f"{'':16}   {key} (default {default})")
    return DONE


def _print_board(board: dict[str, Any], *, as_json: bool, reasons: bool) -> None:
    if as_json:
        print(json.dumps(board, indent=1, sort_keys=True, ensure_ascii=False))
        return
    from kvgate.evals.report.tables import print_leaderboard, stdout_console

    console = stdout_console()
    print_leaderboard(board, console, reasons=reasons)
    from kvgate.evals.leaderboard.fidelity import fidelity_lines

    for line in fidelity_lines(board):
        console.print(line, highlight=False)
    if "stopped" in board:
        from kvgate.evals.run.early_stopping import describe

        console.print(describe(board["stopped"]), highlight=False)


def _enforced(board: dict[str, Any], enforce: bool) -> int:
    passed = bool(board["rows"]) and all(row["status"] == "enable" for row in board["rows"])
    return NOT_PASSED if enforce and not passed else DONE
