"""The command line. One file a command beside this one; only the one that is asked for is imported."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import kvgate
from kvgate.cli.output import BAD_INPUT, BROKEN_PIPE, INTERRUPTED

COMMANDS: Mapping[str, tuple[str, str]] = {
    "run": ("run", "run a plan and judge it"),
    "gate": ("gate", "judge a finished run by a gate"),
    "canary": ("canary", "emit the canary config of an enabled policy"),
    "show": ("show", "show a finished run"),
    "verify": ("verify", "build and score a finished run again from its plan"),
    "policies": ("policies", "list the policies"),
    "suites": ("suites", "list the suites"),
    "plan": ("plan", "what a plan would run; with --power, the items its gate needs"),
    "report": ("report", "write a finished run's report: one HTML page, figures as PNG and SVG"),
    "rerun": ("rerun", "make a leaderboard row again and compare"),
    "compare": ("compare", "judge what others ran: pairs of scores, logs of lm-eval and inspect_ai"),
    "lm-eval": ("lm_eval", "run lm-eval tasks exact and under policies"),
    "prove": ("prove", "simulate policies with a known loss and report how often the gate errs"),
    "power": ("power", "how many items a gate needs"),
    "replay": ("replay", "replay a workload without a model and print its figures"),
    "serve": ("serve", "serve a model over HTTP with OpenAI's protocol"),
    "metrics": ("engine_metrics", "serve the lifecycle manager's Prometheus metrics"),
}
"""Command -> its module in ``kvgate.cli`` and one line about it. The module has ``add_parser(commands)``."""

OPTIONAL: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "torch",
            "transformers",
            "triton",
            "safetensors",
            "gguf",
            "accelerate",
            "datasets",
            "lm_eval",
            "prometheus_client",
        ),
        "run",
    ),
    "matplotlib": "report",
    "starlette": "serve",
    "uvicorn": "serve",
}
"""Package -> the extra that brings it, for commands that need more than judging does."""

_DESCRIPTION = """\
Measures KV-cache eviction policies against exact full-KV runs of your model, and decides which may be switched on.

  kvgate run                       the quick plan on the embedded model, about ten minutes on two cores
  kvgate run --model Qwen/Qwen2.5-7B-Instruct --plan full --out results/qwen
  kvgate show results/quick        the leaderboard again, with every reason
  kvgate gate results/quick --gate production --enforce
  kvgate canary results/quick --policy 'h2o@0.75'
"""
_EPILOG = "exit codes: 0 done, 1 the gate was not passed where --enforce asked for it (or no canary), 2 bad input"


class Parser(argparse.ArgumentParser):
    """Says what is wrong with a command line as every other fault is said."""

    def error(self, message: str) -> NoReturn:
        """Raise ValueError."""
        raise ValueError(f"{' '.join(message.split())[:400]}; see {self.prog} --help")


def build_parser(asked: str | None = None) -> argparse.ArgumentParser:
    """The command line with the options of the command ``asked`` for; of the others it knows names and purpose."""
    parser = Parser(
        prog="kvgate", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"kvgate {kvgate.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, (module, about) in COMMANDS.items():
        if name == asked:
            added = len(commands.choices)
            importlib.import_module(f"kvgate.cli.{module}").add_parser(commands)
            assert list(commands.choices)[added:] == [name], f"{module}: registers another command than {name}"
        else:
            commands.add_parser(name, help=about)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    # Threads that spin while they wait make a shared machine ten times slower; read when torch is imported, below.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        return _flushed(arguments)
    except OSError as error:
        failure = None if error.filename else _stdout_failure()
        if failure is None or failure.errno != error.errno:  # a file's or a socket's
            if os.environ.get("KVGATE_DEBUG"):
                raise
            name = f"{error.filename!s:.200}: " if error.filename else ""
            print(f"kvgate: {name}{error.strerror or error}", file=sys.stderr)
            return BAD_INPUT
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
    words = sys.argv[1:] if arguments is None else list(arguments)
    debug = bool(os.environ.get("KVGATE_DEBUG"))
    try:
        if sys.stdout is None:  # and the next file opened would take its place
            raise ValueError("standard output: closed; send it somewhere, as in `> /dev/null`")
        options = build_parser(next((word for word in words if not word.startswith("-")), None)).parse_args(words)
        run: Callable[[argparse.Namespace], int] = options.run
        return run(options)
    except ValueError as error:
        if debug:
            raise
        print(f"kvgate: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if debug or missing not in OPTIONAL:
            raise
        print(f"kvgate: {missing} is not installed; pip install 'kvgate[{OPTIONAL[missing]}]'", file=sys.stderr)
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
