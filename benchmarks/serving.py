"""Tokens per second at 1, 8 and 32 requests: kvgate over HTTP and its loop alone, beside transformers in the same run.

    python benchmarks/serving.py --json results/serving/throughput.json

``generate`` is transformers' static batch, ``generate_batch`` its continuous batching; all four get the same prompts,
greedy, and write the same number of tokens. Rounds go round robin, and each way keeps its best, since neighbours on the
machine only ever slow it down. Also what a shadow costs: the same requests with a policy beside each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
PROMPT, ANSWER = 96, 48


def main() -> None:
    """Measure and print; ``--json`` keeps the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--client", nargs=2, metavar=("URL", "REQUESTS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client:
        print(json.dumps(asyncio.run(_client(args.client[0], int(args.client[1])))))
        return
    figures = _measure(args.requests, args.rounds, args.dtype)
    print(_table(figures))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")


def _measure(sizes: list[int], rounds: int, dtype: str) -> dict[str, Any]:
    import torch

    loop, url, stop = _served(dtype)
    theirs = _transformers(dtype)
    ways: dict[str, Callable[[int], float]] = {
        "kvgate serve": lambda n: _over_http(url, n),
        "kvgate loop": lambda n: loop(n, False),
        "kvgate loop with shadows": lambda n: loop(n, True),
        **theirs,
    }
    found: dict[str, dict[str, float]] = {}
    try:
        for size in sizes:
            best = dict.fromkeys(ways, 0.0)
            for _ in range(rounds):
                for name, way in ways.items():
                    best[name] = max(best[name], size * ANSWER / way(size))
            found[str(size)] = best
    finally:
        stop()
    return {
        "schema_version": SCHEMA_VERSION, "dtype": dtype, "threads": torch.get_num_threads(), "prompt": PROMPT,
        "answer": ANSWER, "rounds": rounds, "tokens_per_s": found, "ratios": {n: _ratios(v) for n, v in found.items()},
    }  # fmt: skip


def _ratios(speed: dict[str, float]) -> dict[str, float]:
    served, loop = speed["kvgate serve"], speed["kvgate loop"]
    return {
        "serve over generate_batch": served / speed["generate_batch"],
        "serve over generate": served / speed["generate"],
        "time HTTP adds": loop / served - 1.0,
        "time shadows take": loop / speed["kvgate loop with shadows"],
    }


def _prompts(count: int) -> list[list[int]]:
    import numpy as np

    random = np.random.default_rng(11)
    return random.integers(1000, 40_000, (count, PROMPT)).tolist()


# -- kvgate -----------------------------------------------------------------------------------------------------------


def _served(dtype: str) -> tuple[Callable[[int, bool], float], str, Callable[[], None]]:
    import uvicorn

    from kvgate.compressors.h2o import H2O
    from kvgate.engine.models import load_model
    from kvgate.engine.served import Beside
    from kvgate.lifecycle.states import Spec
    from kvgate.serving.app import build_app
    from kvgate.serving.build import build_service
    from kvgate.serving.config import parse_serve_config

    model = load_model("embedded", dtype=dtype)
    config = parse_serve_config({"lifecycle": {"tokens_per_step": 4096, "max_running": 64}})
    service = build_service("embedded", model, config, 1024)
    alone = build_service("embedded", model, config, 1024).driver.server
    policy = H2O.for_budget(PROMPT // 2)
    calls = iter(range(10**9))

    def loop(count: int, shadows: bool) -> float:
        began = time.perf_counter()
        # A prefix cache would answer the second round for free.
        for prompt in _prompts(count):
            spec = Spec(f"r{next(calls)}", PROMPT, ANSWER, model_version=f"round {next(calls)}")
            alone.submit(spec, prompt, beside=Beside(policy) if shadows else None)
        while alone.busy:
            alone.step()
        return time.perf_counter() - began

    server = uvicorn.Server(uvicorn.Config(build_app(service), port=0, log_level="warning", access_log=False))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]

    def stop() -> None:
        server.should_exit = True
        thread.join(30)

    return loop, f"http://127.0.0.1:{port}", stop


def _over_http(url: str, count: int) -> float:
    """Clients in a process of their own, as they would be; seconds from the first request to the last token."""
    done = subprocess.run(
        [sys.executable, __file__, "--client", url, str(count)], capture_output=True, text=True, check=True
    )
    return float(json.loads(done.stdout)["seconds"])


async def _client(url: str, count: int) -> dict[str, float]:
    import aiohttp

    salt = time.time_ns() % 30_000  # another first token each time: nothing is found in the prefix cache

    async def one(session: aiohttp.ClientSession, prompt: list[int]) -> None:
        body = {
            "model": "embedded", "prompt": [salt, *prompt[1:]], "max_tokens": ANSWER, "temperature": 0, "stream": True,
            "logit_bias": {"2": -100, "0": -100},
        }  # fmt: skip
        async with session.post(f"{url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: [DONE]"):
                    return

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        began = time.perf_counter()
        await asyncio.gather(*(one(session, prompt) for prompt in _prompts(count)))
        return {"seconds": time.perf_counter() - began}


# -- transformers -----------------------------------------------------------------------------------------------------


def _transformers(dtype: str) -> dict[str, Callable[[int], float]]:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    from kvgate.engine.embedded import embedded_folder
    from kvgate.engine.models import DTYPES

    model = AutoModelForCausalLM.from_pretrained(embedded_folder(), dtype=DTYPES[dtype], attn_implementation="sdpa")
    settings = GenerationConfig(
        max_new_tokens=ANSWER, min_new_tokens=ANSWER, do_sample=False, eos_token_id=None, pad_token_id=0
    )

    def static(count: int) -> float:
        began = time.perf_counter()
        with torch.inference_mode():
            found = model.generate(torch.tensor(_prompts(count)), generation_config=settings)
        assert found.shape[1] == PROMPT + ANSWER, "not all tokens were written"
        return time.perf_counter() - began

    def continuous(count: int) -> float:
        began = time.perf_counter()
        found = model.generate_batch(inputs=_prompts(count), generation_config=settings, progress_bar=False)
        assert [len(each.generated_tokens) for each in found.values()] == [ANSWER] * count, "not all were written"
        return time.perf_counter() - began

    return {"generate": static, "generate_batch": continuous}


def _table(figures: dict[str, Any]) -> str:
    names = list(next(iter(figures["tokens_per_s"].values())))
    lines = [f"{'requests':>8}  " + "  ".join(f"{name:>24}" for name in names)]
    for size, speed in figures["tokens_per_s"].items():
        lines.append(f"{size:>8}  " + "  ".join(f"{speed[name]:24.1f}" for name in names))
    for size, ratios in figures["ratios"].items():
        lines.append(f"{size:>8}  " + ", ".join(f"{name} {value:.2f}" for name, value in ratios.items()))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
