"""A server on a free loopback port in a thread, over a tiny model with random weights."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import openai
import uvicorn

from kvgate.engine.models import LoadedModel
from kvgate.serving.app import build_app
from kvgate.serving.build import build_service
from kvgate.serving.canary.settings import Canary
from kvgate.serving.config import ServeConfig, parse_serve_config

TEMPLATE = (
    "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


def tiny_chat_model(folder: Path, seed: int = 0) -> Path:
    """A Llama of a few thousand weights with a byte-level tokenizer and a chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate([*alphabet, "<eos>"])}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, eos_token_id=len(vocabulary) - 1, bos_token_id=None,
        initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


class Live:
    """See the module docstring. ``settings``: of ``serve.yaml``, as plain data."""

    def __init__(
        self,
        model: LoadedModel,
        settings: dict[str, Any] | None = None,
        blocks: int = 512,
        canary: Canary | None = None,
        state: Path | None = None,
    ) -> None:
        config = parse_serve_config(settings) if settings else ServeConfig()
        self.service = build_service("tiny", model, config, blocks, canary, state)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._uvicorn = uvicorn.Server(uvicorn.Config(build_app(self.service), log_level="warning", access_log=False))
        self._thread = threading.Thread(target=self._uvicorn.run, kwargs={"sockets": [self._socket]}, daemon=True)

    def __enter__(self) -> Live:
        self._thread.start()
        until = time.monotonic() + 30
        while not self._uvicorn.started and time.monotonic() < until:
            time.sleep(0.01)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._uvicorn.should_exit = True
        self._thread.join(30)
        self._socket.close()

    def client(self, key: str = "none", **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60, **options)

    def send(
        self, method: str, path: str, body: bytes | Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """One request with the plain library; ``body`` bytes go as they are, anything else as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        try:
            connection.request(method, path, raw, headers or {})
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def idle(self, seconds: float = 30.0) -> None:
        """Wait until no request is on its way."""
        until = time.monotonic() + seconds
        while self.service.driver.live and time.monotonic() < until:
            time.sleep(0.01)
        assert self.service.driver.live == 0, "requests are still on their way"

    def audit(self) -> None:
        """Nobody holds anything, and pool, tables, cache and promises agree."""
        self.idle()
        server = self.service.driver.server

        def look() -> None:
            server.store.check()
            assert server.store.available() == server.store.total, "pages are held by nobody"
            assert not server.requests, "ended requests are remembered"

        self.service.driver.call(look).result(timeout=30)
