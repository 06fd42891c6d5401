"""The part of ``kvgate compare`` that asks two endpoints."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from kvgate.cli.output import finite

if TYPE_CHECKING:
    from kvgate.evals.compare.endpoints.compare import EndpointComparison


def add_parser(parser: argparse.ArgumentParser) -> None:
    """Add the options of endpoints. Keys come from the environment, never from the command line."""
    group = parser.add_argument_group("endpoints", "two OpenAI-compatible servers, such as http://127.0.0.1:8000")
    group.add_argument("--exact", metavar="URL", help="endpoint of the exact engine")
    group.add_argument("--candidate", metavar="URL", help="endpoint of the engine to judge")
    group.add_argument("--model", default="", help="model id at both (default: the only one served)")
    group.add_argument("--candidate-model", default="", help="model id at the candidate's, where it differs")
    group.add_argument("--api", choices=("completions", "chat"), default="completions", help="which API to ask")
    group.add_argument("--stream", action="store_true", help="ask for streams")
    group.add_argument("--key-variable", default="OPENAI_API_KEY", help="environment variable that holds the key")
    group.add_argument("--plan", default="quick", help="plan whose suites are asked (quick); its policies are not used")
    group.add_argument("--tokenizer", help="folder, hub id or 'embedded' (default: the endpoint's /tokenize)")
    group.add_argument("--concurrency", type=int, default=4, help="requests at once (4)")
    group.add_argument(
        "--noise-share", type=float, default=0.1, help="share of items the exact side is asked twice (.1)"
    )
    group.add_argument("--retries", type=int, default=5, help="further tries of a failed request (5)")
    group.add_argument("--flags", default="", help="how the candidate was started; recorded as given")
    group.add_argument("--out", type=Path, help="folder of the answers (results/compare-<plan>)")


def compare(options: argparse.Namespace) -> bool:
    """Ask, judge, show; whether the candidate is enabled. ValueError for bad input and for missing answers."""
    from kvgate.evals.compare.endpoints.client import Endpoint
    from kvgate.evals.compare.endpoints.compare import RESULT, Settings, compare_endpoints
    from kvgate.evals.judge.gates import load_gate
    from kvgate.evals.plan.config import load_plan

    if not (options.exact and options.candidate):
        raise ValueError("compare: --exact and --candidate go together")
    config = load_plan(options.plan, {})
    out = options.out or Path("results") / f"compare-{config.name}"
    common = {"api": options.api, "key_variable": options.key_variable, "stream": options.stream}
    exact = Endpoint(options.exact, options.model, retries=options.retries, **common)
    other = Endpoint(options.candidate, options.candidate_model or options.model, retries=options.retries, **common)
    settings = Settings(options.tokenizer, options.concurrency, options.noise_share, options.flags)
    gate = load_gate(options.gate) if options.gate else None
    found = compare_endpoints(config, exact, other, settings, out, _progress(options.json), gate)
    if options.json:
        print(json.dumps(finite(asdict(found)), indent=1, sort_keys=True, ensure_ascii=False))
    else:
        _show(found, out / RESULT)
    return found.verdict.status == "enable"


def _show(found: EndpointComparison, path: Path) -> None:
    from kvgate.evals.compare.endpoints.tables import print_comparison
    from kvgate.evals.report.tables import stdout_console

    console = stdout_console()
    print_comparison(found.verdict, console)
    noise = found.noise
    notes = [
        f"exact against itself: {noise.items} items asked twice, {noise.texts_differ:.1%} with another text, scores "
        f"change by {noise.score_change:.3f} (at most {noise.upper:.3f})",
        f"exact: {found.exact.model} {found.exact.version}",
        f"candidate: {found.candidate.model} {found.candidate.version} {found.candidate.flags}",
        *(f"left out: {task} needs likelihoods" for task in found.left_out),
        *([f"{found.unchecked} answers without a count of prompt tokens"] if found.unchecked else []),
        f"record: {path}",
    ]
    for note in notes:
        console.print(note, highlight=False, markup=False)


def _progress(quiet: bool) -> Callable[[int, int], None]:
    def silent(done: int, total: int) -> None:
        return None

    def show(done: int, total: int) -> None:
        if done % max(1, total // 20) == 0 or done == total:
            print(f"{done}/{total} answers", file=sys.stderr)

    return silent if quiet else show
