"""What each policy's scoring costs beside a prefill, and how much of the memory it should save it really frees.

Contexts of the embedded model's retrieval suite. Seconds: of the prefill with the policy's evidence collected, of its
scores (probes included), and of choosing and freeing, medians. Real share: whole pages freed against the exact run,
over slots evicted, after 32 more tokens were fed, as when an answer starts.

    python benchmarks/policies.py [--lengths 512,2048] [--repeats 3] [--budget 0.9] [--out results/policies/costs.json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from kvgate.compressors.catalog import policy_class
from kvgate.compressors.policy import Policy
from kvgate.compressors.scored import Scored
from kvgate.engine.engine import Engine
from kvgate.engine.models import LoadedModel, load_model
from kvgate.evals.data.tokens import Tokens
from kvgate.evals.plan.cells import Configuration, configurations, resolve
from kvgate.evals.plan.config import RunConfig, SuiteChoice, parse_policy, shipped
from kvgate.evals.suites.base import BuildSpec
from kvgate.evals.suites.catalog import suite_class

PAGE_SIZES, QUESTION = (8, 16, 32), 32


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="512,2048")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budget", type=float, default=0.9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    loaded = load_model()
    choices = tuple(parse_policy({"use": name, "budgets": [options.budget]}, name) for name in shipped("policies"))
    found = configurations(RunConfig("policies", (SuiteChoice("retrieval"),), choices))[1:]
    rows = []
    for length in map(int, options.lengths.split(",")):
        spec = BuildSpec(counts={length: 1}, tasks=("single",))
        context = list(suite_class("retrieval")().build(Tokens(loaded.tokenizer), spec)[0].context)
        for configuration in found:
            rows.append(_measured(loaded, context, configuration, options.repeats))
            print(json.dumps(rows[-1]), flush=True)
    machine = {"threads": torch.get_num_threads(), "cores": os.cpu_count(), "torch": torch.__version__}
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        record = {"machine": machine, "budget": options.budget, "repeats": options.repeats, "rows": rows}
        options.out.write_text(json.dumps(record, indent=1) + "\n")


def _measured(loaded: LoadedModel, context: list[int], configuration: Configuration, repeats: int) -> dict[str, Any]:
    assert configuration.request is not None
    budget = resolve(configuration.request, len(context))
    policy = policy_class(configuration.name).for_budget(budget, **configuration.params)
    heads = loaded.info.layers * loaded.info.kv_heads
    took: dict[str, list[float]] = {"prefill": [], "prefill_with_evidence": [], "score": [], "evict": []}
    share, probed = {}, 0
    for size in PAGE_SIZES:
        engine = Engine(loaded, pages=heads * (-(-len(context) // size) + 8) * 5, page_size=size)
        for _ in range(repeats if size == 16 else 1):
            seconds, share[size], probed = _once(engine, context, policy)
            if size == 16:
                for name, value in seconds.items():
                    took[name].append(value)
    medians = {name: round(statistics.median(values), 4) for name, values in took.items()}
    shares = {str(size): round(value, 3) for size, value in share.items()}
    return {
        "policy": configuration.label, "context_tokens": len(context), "budget": budget, "seconds": medians,
        "probe_tokens": probed, "real_share_by_page_size": shares,
    }  # fmt: skip


def _once(engine: Engine, context: list[int], policy: Policy) -> tuple[dict[str, float], float, int]:
    clock = [time.perf_counter()]
    exact, _ = engine.prefill(context)
    clock.append(time.perf_counter())
    snapshot, _ = engine.prefill(context, needs=policy.needs)
    clock.append(time.perf_counter())
    scores = engine.score(snapshot, policy) if isinstance(policy, Scored) else None
    clock.append(time.perf_counter())
    row = engine.fork(snapshot, policy)
    engine.evict(row, scores=scores, compact=True)
    clock.append(time.perf_counter())
    for each in (exact, row):
        engine.extend([each], [context[:QUESTION]])
        engine.compact(each)
    slots = engine.live_tokens(exact) - engine.live_tokens(row)
    pages = engine.resident_pages(exact) - engine.resident_pages(row)
    probed = row.probed
    for each in (exact, snapshot, row):
        engine.release(each)
    names = ("prefill", "prefill_with_evidence", "score", "evict")
    seconds = {name: clock[i + 1] - clock[i] for i, name in enumerate(names)}
    return seconds, pages * engine.tables.geometry.page_size / slots, probed


if __name__ == "__main__":
    main()
