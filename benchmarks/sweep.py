"""What a policy sweep costs beside the exact run alone, in one process, on the same prompts.

Four needle prompts of about 1,500 tokens, 16 new tokens, bf16, ten cells: full; streaming_llm, sliding_window and h2o
at 25, 50 and 75 %. One prefill a prompt serves all its cells. The order alternates, and the ratio is of medians.

    python benchmarks/sweep.py [--repeats 3] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import replace

from kvgate.engine.engine import Engine
from kvgate.engine.models import load_model
from kvgate.evals.data.items import Exact, Item
from kvgate.evals.data.tokens import Tokens
from kvgate.evals.plan.cells import Configuration, Shard, configurations, shards
from kvgate.evals.plan.config import PolicyChoice, RunConfig, SuiteChoice
from kvgate.evals.run.prompts import pages_needed
from kvgate.evals.run.runner import Runner
from kvgate.evals.suites.base import BuildSpec
from kvgate.evals.suites.catalog import suite_class

RATIOS = (0.25, 0.5, 0.75)
POLICIES = tuple(PolicyChoice(name, RATIOS) for name in ("streaming_llm", "sliding_window", "h2o"))
PROMPTS, LENGTH, NEW_TOKENS = 4, 1494, 16


def main() -> None:
    """Print seconds and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    loaded = load_model()
    loaded = replace(loaded, info=replace(loaded.info, stop_ids=()))
    config = RunConfig("sweep", (SuiteChoice("retrieval"),), POLICIES)
    spec = BuildSpec(counts={LENGTH: PROMPTS}, tasks=("single",))
    items = [_unending(item) for item in suite_class("retrieval")().build(Tokens(loaded.tokenizer), spec)]
    sweep, alone = (_shard(items, found) for found in (configurations(config), configurations(config)[:1]))
    pages = pages_needed(loaded.info.layers * loaded.info.kv_heads, config.page_size, sweep)
    runner = Runner(Engine(loaded, pages=pages), loaded.tokenizer, "0" * 32)
    seconds: dict[str, list[float]] = {"exact alone": [], "ten cells": []}
    runner.run(alone)
    for _ in range(options.repeats):
        for name, shard in (("exact alone", alone), ("ten cells", sweep)):
            start = time.perf_counter()
            runner.run(shard)
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratio = medians["ten cells"] / medians["exact alone"]
    if options.json:
        print(json.dumps({"seconds": seconds, "ratio": ratio}))
        return
    for name, values in seconds.items():
        print(f"{name:12} median {medians[name]:6.2f} s   (min {min(values):.2f}, max {max(values):.2f})")
    print(f"ratio        {ratio:.2f}   (target: at most 2.0)")


def _unending(item: Item) -> Item:
    """The same item with an answer of exactly ``NEW_TOKENS``: nothing but the cap ends it."""
    turn = replace(item.turns[0], max_new_tokens=NEW_TOKENS, stop=(), scoring=Exact(("",)))
    return replace(item, turns=(turn,))


def _shard(items: list[Item], found: list[Configuration]) -> Shard:
    (shard,) = shards(items, found, batch_rows=len(items) * len(found), fingerprint="sweep")
    return shard


if __name__ == "__main__":
    main()
