"""llama.cpp's own HTTP server, as the package ``xllamacpp`` ships it, on loopback with settings fit for shared cores.

``python -m kvgate.evals.compare.engines.llama_cpp_server --model FILE.gguf --port 8100 [--kv q8_0]``. One thread
without polling: threads that spin while they wait make shared cores tens of times slower. It ignores ``echo``.
"""

from __future__ import annotations

import argparse
import json
import threading
from typing import Any

KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")


def main() -> None:
    """Serve until the process is ended. Prints one line of JSON once it listens."""
    parser = argparse.ArgumentParser(description="llama.cpp's server on loopback")
    parser.add_argument("--model", required=True, help="GGUF file")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--kv", choices=KV_TYPES, default="f32", help="precision of keys and values")
    parser.add_argument("--context", type=int, default=4096, help="tokens of the context window")
    parser.add_argument("--shift", action="store_true", help="drop old tokens when the window is full")
    parser.add_argument("--keep", type=int, default=0, help="with --shift: first tokens that stay")
    options = parser.parse_args()
    server = serve(options)
    print(json.dumps({"listening": server.listening_address}), flush=True)
    threading.Event().wait()


def serve(options: argparse.Namespace) -> Any:
    """A started server; it stops when the object goes."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = options.model
    params.model_alias = {"embedded"}
    params.port = options.port
    params.n_ctx, params.n_parallel = options.context, 1
    params.ctx_shift, params.n_keep = options.shift, options.keep
    for processors in (params.cpuparams, params.cpuparams_batch):
        processors.n_threads, processors.poll = 1, 0
    # Quantised values need flash attention, so every precision gets it: one thing differs, not two.
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    kind = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{options.kv.upper()}")
    params.cache_type_k = params.cache_type_v = kind
    # What is reused of an earlier prompt was computed in other batches: answers would depend on the order of items.
    params.cache_prompt = False
    return xllamacpp.Server(params)


if __name__ == "__main__":
    main()
