"""OpenAI's requests as frozen dataclasses: every parameter checked, none ignored in silence."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvgate.serving.errors import ApiError
from kvgate.serving.fields import Fields
from kvgate.serving.prompts import Prompts, parse_messages
from kvgate.serving.sampling import Sampling

_MOST_LOGPROBS = 20


@dataclass(frozen=True)
class Wanted:
    """One request, whichever of the two endpoints it came by.

    Attributes:
        chat: which of the two. model: as named. prompts: token ids of each prompt. max_tokens: None where not named.
        n: answers to each prompt. stops: stop texts. sampling: of the first answer; the others count its seed up.
        logprobs: likeliest tokens to name beside the chosen one; None for no log-probabilities.
        echo: the prompt is part of the answer. stream, usage_chunk: answer in pieces, the usage at the end.
        metadata: the caller's, for conversations, references and kinds. user: the caller's name for its user.
        opening: what tells conversations apart where no id is given.
    """

    chat: bool
    model: str
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int | None
    n: int
    stops: tuple[str, ...]
    sampling: Sampling
    logprobs: int | None
    echo: bool
    stream: bool
    usage_chunk: bool
    metadata: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    opening: str = ""


def parse_body(body: bytes) -> Any:
    """JSON of a request. ApiError 400 where it is none."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {str(error)[:120]}") from error


def parse_chat(raw: Any, prompts: Prompts) -> Wanted:
    """A /v1/chat/completions request."""
    fields = Fields(raw)
    model = _model(fields)
    messages = parse_messages(fields.required("messages"))
    newer = fields.integer("max_completion_tokens", None, 1)
    older = fields.integer("max_tokens", None, 1)
    logprobs = fields.flag("logprobs")
    top = fields.integer("top_logprobs", 0, 0, _MOST_LOGPROBS)
    if top and not logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    _inert_chat(fields)
    opening = json.dumps(messages[: next((i + 1 for i, m in enumerate(messages) if m["role"] == "user"), 1)])
    common = _common(fields)
    fields.finish()
    return Wanted(
        chat=True,
        model=model,
        prompts=(tuple(prompts.of_messages(messages)),),
        max_tokens=older if newer is None else newer,
        logprobs=top if logprobs else None,
        echo=False,
        opening=opening,
        **common,
    )


def parse_completion(raw: Any, prompts: Prompts) -> Wanted:
    """A /v1/completions request."""
    fields = Fields(raw)
    model = _model(fields)
    ids = prompts.of_prompt(fields.required("prompt"))
    max_tokens = fields.integer("max_tokens", 16, 0)
    logprobs = fields.integer("logprobs", None, 0, _MOST_LOGPROBS)
    echo = fields.flag("echo")
    if max_tokens == 0 and not echo:
        raise ApiError(400, "max_tokens is 0, which needs echo", param="max_tokens")
    fields.inert("suffix", "")
    best_of = fields.integer("best_of", None, 1)
    common = _common(fields)
    fields.finish()
    if best_of not in (None, common["n"]):
        raise ApiError(400, "best_of is not supported beyond n", param="best_of", code="unsupported_parameter")
    if echo and common["stream"]:
        raise ApiError(400, "echo cannot be streamed", param="echo")
    return Wanted(
        chat=False,
        model=model,
        prompts=tuple(map(tuple, ids)),
        max_tokens=max_tokens,
        logprobs=logprobs,
        echo=echo,
        opening=json.dumps(ids[0][:64]),
        **common,
    )


def _model(fields: Fields) -> str:
    model = fields.required("model")
    if not isinstance(model, str):
        raise fields.wrong("model", model, "a string")
    return model


def _common(fields: Fields) -> dict[str, Any]:
    """What both endpoints have."""
    stream = fields.flag("stream")
    options = fields.raw("stream_options")
    usage = False
    if options is not None:
        if not stream:
            raise ApiError(400, "stream_options needs stream to be true", param="stream_options")
        inner = Fields(options, "stream_options")
        usage = inner.flag("include_usage")
        inner.flag("include_obfuscation")
        inner.finish()
    return {
        "n": fields.integer("n", 1, 1, 128),
        "stops": _stops(fields),
        "sampling": _sampling(fields),
        "stream": stream,
        "usage_chunk": usage,
        "metadata": _metadata(fields),
        "user": fields.text("user"),
    }


def _sampling(fields: Fields) -> Sampling:
    seed = fields.integer("seed", None, -(2**63))
    top_k = fields.integer("top_k", 0, -1)
    return Sampling(
        temperature=fields.number("temperature", 1.0, 0.0, 2.0),
        top_p=fields.number("top_p", 1.0, 0.0, 1.0),
        top_k=max(0, top_k or 0),
        seed=secrets.randbits(63) if seed is None else seed,
        presence_penalty=fields.number("presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        bias=_bias(fields),
    )


def _bias(fields: Fields) -> dict[int, float]:
    raw = fields.raw("logit_bias", {})
    wrong = fields.wrong("logit_bias", raw, "an object of token ids with numbers between -100 and 100")
    if not isinstance(raw, dict) or len(raw) > 1024:
        raise wrong
    for token, value in raw.items():
        usable = token.isascii() and token.isdigit() and isinstance(value, int | float) and not isinstance(value, bool)
        if not usable or not -100 <= value <= 100:
            raise wrong
    return {int(token): float(value) for token, value in raw.items()}


def _stops(fields: Fields) -> tuple[str, ...]:
    raw = fields.raw("stop", [])
    stops = [raw] if isinstance(raw, str) else raw
    good = isinstance(stops, list) and len(stops) <= 16
    if not good or not all(isinstance(stop, str) and 0 < len(stop) <= 1000 for stop in stops):
        raise fields.wrong("stop", raw, "a text, or at most 16 of them, none empty")
    return tuple(stops)


def _metadata(fields: Fields) -> dict[str, str]:
    raw = fields.raw("metadata", {})
    if not isinstance(raw, dict) or len(raw) > 16 or not all(isinstance(value, str) for value in raw.values()):
        raise fields.wrong("metadata", raw, "an object of at most 16 strings")
    return dict(raw)


def _inert_chat(fields: Fields) -> None:
    fields.inert("response_format", {"type": "text"})
    fields.inert("tools", [])
    fields.inert("tool_choice", "none", "auto")
    fields.inert("parallel_tool_calls", True, False)
    fields.inert("functions", [])
    fields.inert("function_call", "none", "auto")
    fields.inert("modalities", ["text"])
    fields.inert("store", False)
    fields.inert("service_tier", "auto", "default")
    fields.inert("reasoning_effort", "none")
