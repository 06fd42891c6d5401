"""``kvgate serve``: a model over HTTP with OpenAI's protocol, exact or with a canary."""

from __future__ import annotations

import argparse
import logging
import socket
from pathlib import Path
from typing import Any

_DESCRIPTION = """\
Serves a model with OpenAI's protocol: /v1/chat/completions, /v1/completions, /v1/models; also /health, /ready,
/metrics, /tokenize and /version. SIGTERM drains: running answers end, new requests get 503.

  kvgate serve --model embedded
  kvgate serve --model embedded --config serve.yaml --port 8000
  kvgate serve --model embedded --canary results/run/canary/h2o-0.75.yaml
  kvgate canary status results/run/canary/h2o-0.75.state
"""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "serve", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="embedded", help="hub id, folder, or 'embedded'")
    parser.add_argument("--revision", help="hub revision of the model")
    parser.add_argument("--name", help="the model's name for clients (default: as in --model)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="default: float32 on a CPU, where it makes answers independent of the batch, else bfloat16",
    )
    parser.add_argument("--config", type=Path, help="settings (YAML): keys, limits, lifecycle")
    parser.add_argument("--canary", type=Path, help="canary config (from `kvgate canary`): shadow, then traffic")
    parser.add_argument("--state", type=Path, help="folder of the canary's journal (default: beside its config)")
    parser.add_argument("--blocks", type=int, default=1024, help="blocks of the page pool (16 tokens each by default)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="port; 0 takes a free one")
    parser.set_defaults(run=main)


def main(args: argparse.Namespace) -> int:
    """Serve until a signal comes; 0 after a drain. ValueError names bad input in one line."""
    if args.blocks < 2:
        raise ValueError(f"--blocks {args.blocks}: needs at least 2")
    if not 0 <= args.port < 65536:
        raise ValueError(f"--port {args.port}: needs 0 to 65535")
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ValueError(f"serve: {error.name} is not installed; run `pip install 'kvgate[serve]'`") from error
    import torch

    from kvgate.engine.models import load_model
    from kvgate.serving.app import build_app
    from kvgate.serving.build import build_service
    from kvgate.serving.canary.settings import load_canary
    from kvgate.serving.config import ServeConfig, load_serve_config
    from kvgate.serving.run import serve

    config = load_serve_config(args.config) if args.config else ServeConfig()
    canary = load_canary(args.canary) if args.canary else None
    if args.state and canary is None:
        raise ValueError("--state: belongs to --canary; give both")
    state = args.state or (args.canary.with_suffix(".state") if args.canary else None)
    listening = _listen(args.host, args.port)
    dtype = args.dtype or ("bfloat16" if torch.cuda.is_available() else "float32")
    model = load_model(args.model, dtype=dtype, revision=args.revision)
    service = build_service(args.name or args.model, model, config, args.blocks, canary, state)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    host, port = listening.getsockname()[:2]
    print(f"http://{host}:{port} serves {service.name}, at most {service.max_model_len} tokens", flush=True)
    serve(build_app(service), service, listening)
    return 0


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
        made.listen(2048)
    except OSError as error:
        made.close()
        raise ValueError(f"--host {host} --port {port}: {error.strerror}; choose another") from error
    return made
