"""One OpenAI-compatible endpoint: what kvgate asks of it, and nothing that a failure could turn into a score.

The transport is the ``openai`` package: its retries back off on connection errors, 408, 409, 429 and 5xx. What still
fails is raised as :class:`EndpointFailure`, so that it can never be counted as an answer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Api = Literal["completions", "chat"]
PROBE_TIMEOUT = 10.0  # seconds, for what may not exist: /version, /props, /tokenize


class EndpointFailure(Exception):
    """A request that got no answer after all retries; never a score."""


@dataclass(frozen=True)
class Endpoint:
    """Where and how to ask.

    Attributes:
        url: base address, with or without ``/v1``.
        model: model id; "" takes the only one that ``/v1/models`` lists.
        api: ``completions`` sends token ids (or text), ``chat`` sends messages.
        key_variable: environment variable that holds the API key; keys never stand on a command line.
        stream: ask for server-sent events, as interactive clients do.
        retries: further tries of a request, with exponential backoff.
        timeout: seconds for one request.
    """

    url: str
    model: str = ""
    api: Api = "completions"
    key_variable: str = "OPENAI_API_KEY"
    stream: bool = False
    retries: int = 5
    timeout: float = 600.0

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"endpoint {self.url!r}: no http address; use one such as http://127.0.0.1:8000")
        if self.api not in ("completions", "chat"):
            raise ValueError(f"endpoint api {self.api!r}: use completions or chat")

    @property
    def root(self) -> str:
        """The address without ``/v1``."""
        return self.url.rstrip("/").removesuffix("/v1")


@dataclass(frozen=True)
class Reply:
    """One answer. ``prompt_tokens`` and ``finish`` are None where the endpoint does not say."""

    text: str
    prompt_tokens: int | None
    finish: str | None


class EndpointClient:
    """Asks one endpoint. Safe to use from several threads."""

    def __init__(self, endpoint: Endpoint) -> None:
        try:
            import openai
        except ImportError as error:
            raise ValueError("kvgate compare: the package openai is missing; pip install 'kvgate[compare]'") from error
        self.endpoint = endpoint
        self._openai = openai
        key = os.environ.get(endpoint.key_variable) or "none"
        base = endpoint.root + "/v1"
        self._client = openai.OpenAI(base_url=base, api_key=key, max_retries=endpoint.retries, timeout=endpoint.timeout)
        self.model = endpoint.model or self._only_model()

    def _only_model(self) -> str:
        try:
            models = [model.id for model in self._client.models.list()]
        except self._openai.OpenAIError as error:
            raise ValueError(f"endpoint {self.endpoint.url}: /v1/models: {_line(error)}") from error
        if len(models) != 1:
            raise ValueError(
                f"endpoint {self.endpoint.url}: serves {len(models)} models ({', '.join(models[:5])}); name one"
            )
        return models[0]

    def complete(self, prompt: str | Sequence[int], max_tokens: int) -> Reply:
        """Greedy continuation of a text or of token ids. Raises EndpointFailure after the last retry."""
        ids: Any = prompt if isinstance(prompt, str) else list(prompt)
        options = self._streaming()
        try:
            answer = self._client.completions.create(
                model=self.model, prompt=ids, max_tokens=max_tokens, temperature=0.0, seed=0, **options
            )
            return _streamed(answer, _text_piece) if self.endpoint.stream else _whole(answer, _text_of)
        except self._openai.OpenAIError as error:
            raise EndpointFailure(_line(error)) from error

    def chat(self, messages: Sequence[Mapping[str, str]], max_tokens: int) -> Reply:
        """Greedy answer to a conversation. Raises EndpointFailure after the last retry."""
        turns: Any = [dict(message) for message in messages]
        options = self._streaming()
        try:
            answer = self._client.chat.completions.create(
                model=self.model, messages=turns, max_tokens=max_tokens, temperature=0.0, seed=0, **options
            )
            return _streamed(answer, _delta_piece) if self.endpoint.stream else _whole(answer, _message_of)
        except self._openai.OpenAIError as error:
            raise EndpointFailure(_line(error)) from error

    def _streaming(self) -> dict[str, Any]:
        return {"stream": True, "stream_options": {"include_usage": True}} if self.endpoint.stream else {}

    def get(self, path: str) -> Any:
        """JSON of a path below the address, or None where there is no such thing."""
        return self._side("get", path, None)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """JSON of a POST below the address, or None where it is refused."""
        return self._side("post", path, dict(body))

    def _side(self, method: str, path: str, body: Any) -> Any:
        once = self._client.with_options(max_retries=0, timeout=PROBE_TIMEOUT)
        url = self.endpoint.root + path
        try:
            if method == "get":
                return once.get(url, cast_to=object)
            return once.post(url, cast_to=object, body=body)
        except (self._openai.OpenAIError, ValueError):
            return None


def _whole(answer: Any, text_of: Any) -> Reply:
    usage = answer.usage
    if not answer.choices:
        raise EndpointFailure("an answer without choices")
    return Reply(text_of(answer.choices[0]), usage.prompt_tokens if usage else None, answer.choices[0].finish_reason)


def _streamed(chunks: Any, piece_of: Any) -> Reply:
    text, usage, finish = "", None, None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += piece_of(choice)
            finish = choice.finish_reason or finish
    if finish is None:
        raise EndpointFailure("a stream that ended without a finish_reason")
    return Reply(text, usage.prompt_tokens if usage else None, finish)


def _text_of(choice: Any) -> str:
    return choice.text or ""


def _message_of(choice: Any) -> str:
    return choice.message.content or ""


def _text_piece(choice: Any) -> str:
    return choice.text or ""


def _delta_piece(choice: Any) -> str:
    return choice.delta.content or ""


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
