"""Answers in OpenAI's shapes: whole ones, chunks of a stream, log-probabilities in both forms, usage."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvgate.serving.answer import Piece, TokenLogprob
from kvgate.serving.driver import End
from kvgate.serving.text import Pieces


@dataclass
class Choice:
    """One answer as collected: its text so far, log-probabilities, how it ended."""

    index: int
    prompt: Sequence[int]
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    end: End | None = None
    echoed: str = ""
    prompt_logprobs: Mapping[int, TokenLogprob] = field(default_factory=dict)

    def add(self, piece: Piece) -> None:
        """Append a piece."""
        self.text += piece.text
        self.logprobs += piece.logprobs


@dataclass(frozen=True)
class Shape:
    """How the answers to one request look.

    Attributes:
        id, created, model: of the response. chat: which endpoint. logprobs: likeliest tokens to name, None for none.
        echo: the prompt comes first. made: how the answer was made, part of usage.
    """

    id: str
    created: int
    model: str
    chat: bool
    logprobs: int | None
    echo: bool
    made: Mapping[str, Any]
    pieces: Pieces

    # -- whole answers ----------------------------------------------------------------------------------------------

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The response of a request that is not streamed."""
        body = self._head("chat.completion" if self.chat else "text_completion")
        body["choices"] = [self._chat_choice(c) if self.chat else self._text_choice(c) for c in choices]
        body["usage"] = self.usage(choices)
        return body

    def usage(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Tokens, each prompt counted once however many answers it got."""
        prompts = {id(choice.prompt): len(choice.prompt) for choice in choices}
        made = sum(choice.end.tokens for choice in choices if choice.end is not None)
        cached: dict[int, int] = {}
        for choice in choices:
            hit = min(len(choice.prompt), choice.end.cached) if choice.end is not None else 0
            cached[id(choice.prompt)] = max(cached.get(id(choice.prompt), 0), hit)
        return {
            "prompt_tokens": sum(prompts.values()),
            "completion_tokens": made,
            "total_tokens": sum(prompts.values()) + made,
            "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
            "kvgate": dict(self.made),
        }

    def _chat_choice(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": None if self.logprobs is None else self._chat_logprobs(choice.logprobs),
            "finish_reason": _reason(choice),
        }

    def _text_choice(self, choice: Choice) -> dict[str, Any]:
        logprobs = None
        if self.logprobs is not None:
            before = [choice.prompt_logprobs.get(i) or TokenLogprob(t, None) for i, t in enumerate(choice.prompt)]
            logprobs = self._text_logprobs([*(before if self.echo else []), *choice.logprobs], 0)
        return {
            "index": choice.index,
            "text": choice.echoed + choice.text,
            "logprobs": logprobs,
            "finish_reason": _reason(choice),
        }

    # -- streams ----------------------------------------------------------------------------------------------------

    def role(self, index: int) -> bytes:
        """A chat answer's first chunk."""
        return self._chunk({"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})

    def piece(self, choice: Choice, piece: Piece) -> bytes:
        """A chunk; ``choice`` holds what came before it."""
        if self.chat:
            logprobs = self._chat_logprobs(piece.logprobs) if self.logprobs is not None else None
            delta = {"content": piece.text}
            return self._chunk({"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": None})
        offset = len(choice.text)
        logprobs = self._text_logprobs(piece.logprobs, offset) if self.logprobs is not None else None
        return self._chunk({"index": choice.index, "text": piece.text, "logprobs": logprobs, "finish_reason": None})

    def ended(self, choice: Choice) -> bytes:
        """A choice's last chunk."""
        last: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
        return self._chunk({"index": choice.index, **last, "logprobs": None, "finish_reason": _reason(choice)})

    def usage_chunk(self, choices: Sequence[Choice]) -> bytes:
        """The chunk that ``include_usage`` asks for: no choices."""
        body = self._head("chat.completion.chunk" if self.chat else "text_completion")
        return event({**body, "choices": [], "usage": self.usage(choices)})

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        body = self._head("chat.completion.chunk" if self.chat else "text_completion")
        return event({**body, "choices": [choice]})

    # -- log-probabilities ------------------------------------------------------------------------------------------

    def _chat_logprobs(self, found: Sequence[TokenLogprob]) -> dict[str, Any]:
        content = []
        for each in found:
            top = sorted(each.top, key=lambda pair: -pair[1])[: self.logprobs or 0]
            content.append({**self._token(each.token, each.logprob), "top_logprobs": [self._token(*p) for p in top]})
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        raw = self.pieces.bytes_of(token)
        return {"token": self.pieces.text_of(token), "logprob": logprob, "bytes": list(raw)}

    def _text_logprobs(self, found: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        texts = [self.pieces.text_of(each.token) for each in found]
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        top = [{self.pieces.text_of(t): p for t, p in each.top} if each.logprob is not None else None for each in found]
        return {
            "tokens": texts,
            "token_logprobs": [each.logprob for each in found],
            "top_logprobs": top,
            "text_offset": offsets,
        }

    def _head(self, kind: str) -> dict[str, Any]:
        fingerprint = str(self.made.get("weights", ""))[:16]
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"kvgate-{fingerprint}",
        }


DONE = b"data: [DONE]\n\n"


def event(body: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _reason(choice: Choice) -> str | None:
    return choice.end.reason if choice.end is not None else None
