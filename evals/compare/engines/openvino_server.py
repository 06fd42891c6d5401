"""OpenVINO GenAI behind the part of OpenAI's protocol that a comparison asks for: greedy completions of token ids.

``python -m kvgate.evals.compare.engines.openvino_server --model FILE.gguf --port 8100 [--evict START,RECENT,MAX]``.
OpenVINO has no server of its own in this package. Its default precision of keys and values on CPUs is not exact, so
it is always set here, and named in ``/version``.
"""

from __future__ import annotations

import argparse
import threading
from typing import Any


class Engine:
    """A continuous-batching pipeline, asked by one request at a time.

    Args:
        model: GGUF file or folder of an OpenVINO model.
        kv: precision of keys and values ("f32", "f16", "u8" ...).
        evict: start, recent and most tokens of the cache of a sequence, in whole blocks of 32; None keeps all.
    """

    def __init__(self, model: str, kv: str, evict: tuple[int, int, int] | None) -> None:
        import openvino_genai

        self._genai = openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 1
        scheduler.enable_prefix_caching = False
        scheduler.dynamic_split_fuse = evict is None
        scheduler.max_num_batched_tokens = 4096
        if evict is not None:
            start, recent, most = evict
            scheduler.use_cache_eviction = True
            scheduler.cache_eviction_config = openvino_genai.CacheEvictionConfig(
                start, recent, most, openvino_genai.AggregationMode.NORM_SUM
            )
        exact = {"KV_CACHE_PRECISION": kv, "INFERENCE_PRECISION_HINT": "f32"}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", exact)
        self._tokenizer = self._pipeline.get_tokenizer()
        self._lock = threading.Lock()
        self.version = {
            "version": openvino_genai.__version__,
            "engine": "openvino-genai",
            "kv_cache_precision": kv,
            "eviction": "none" if evict is None else f"start {evict[0]}, recent {evict[1]}, at most {evict[2]}",
        }

    def encode(self, text: str, special: bool) -> list[int]:
        """Token ids of a text."""
        ids = self._tokenizer.encode(text, add_special_tokens=special).input_ids.data[0]
        return [int(token) for token in ids]

    def decode(self, ids: list[int]) -> str:
        """Text of token ids, special ones included."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False)) if ids else ""

    def complete(self, ids: list[int], most: int) -> tuple[list[int], str]:
        """Greedy continuation and why it ended."""
        import numpy as np
        import openvino

        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.do_sample = most, False
        with self._lock:
            result = self._pipeline.generate([openvino.Tensor(np.array([ids], dtype=np.int64))], [config])[0]
        tokens = [int(token) for token in result.m_generation_ids[0]]
        return tokens, "length" if len(tokens) >= most else "stop"


def application(engine: Engine) -> Any:
    """The ASGI application."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def models(_: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": "embedded", "object": "model", "owned_by": "openvino"}]})

    async def version(_: Request) -> JSONResponse:
        return JSONResponse(engine.version)

    async def tokenize(request: Request) -> JSONResponse:
        body = await request.json()
        return JSONResponse({"tokens": engine.encode(body["prompt"], body.get("add_special_tokens", True))})

    async def detokenize(request: Request) -> JSONResponse:
        return JSONResponse({"prompt": engine.decode((await request.json())["tokens"])})

    async def completions(request: Request) -> JSONResponse:
        body = await request.json()
        prompt = body["prompt"]
        ids = engine.encode(prompt, True) if isinstance(prompt, str) else prompt
        tokens, finish = await run_in_threadpool(engine.complete, ids, int(body["max_tokens"]))
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(tokens), "total_tokens": len(ids) + len(tokens)}
        choice = {"index": 0, "text": engine.decode(tokens), "finish_reason": finish, "logprobs": None}
        kind = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": "embedded"}
        return JSONResponse({**kind, "choices": [choice], "usage": usage})

    return Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/version", version),
            Route("/tokenize", tokenize, methods=["POST"]),
            Route("/detokenize", detokenize, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
        ]
    )


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(description="OpenVINO GenAI on loopback")
    parser.add_argument("--model", required=True, help="GGUF file, or folder of an OpenVINO model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--kv", default="f32", help="precision of keys and values")
    parser.add_argument("--evict", metavar="START,RECENT,MAX", help="evict to at most MAX tokens")
    options = parser.parse_args()
    evict = None
    if options.evict:
        start, recent, most = (int(part) for part in options.evict.split(","))
        evict = (start, recent, most)
    import uvicorn

    app = application(Engine(options.model, options.kv, evict))
    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
