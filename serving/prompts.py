"""Prompts as token ids: texts, ids, and conversations through the model's chat template."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvgate.serving.errors import ApiError
from kvgate.serving.fields import Fields

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


@dataclass(frozen=True)
class Prompts:
    """Turns what a request gives into ids of one model.

    Attributes:
        tokenizer: any Hugging Face tokenizer. vocabulary: ids that the model's embedding knows.
    """

    tokenizer: Any
    vocabulary: int
    _one: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def of_text(self, text: str, param: str = "prompt") -> list[int]:
        """Ids of a plain text, with the BOS that the tokenizer puts there itself."""
        with self._one:  # fast tokenizers do not like to be entered by two threads at once
            ids: list[int] = self.tokenizer.encode(text)
        if not ids and getattr(self.tokenizer, "bos_token_id", None) is not None:
            ids = [self.tokenizer.bos_token_id]
        if not ids:
            raise ApiError(400, f"{param} is empty", param=param)
        return ids

    def of_prompt(self, raw: Any) -> list[list[int]]:
        """OpenAI's legacy prompt: a text, several, a list of ids, or several of those."""
        if isinstance(raw, str):
            return [self.of_text(raw)]
        if not isinstance(raw, list) or not raw:
            raise ApiError(400, "prompt needs a string, an array of strings, or arrays of token ids", param="prompt")
        if all(isinstance(each, str) for each in raw):
            return [self.of_text(each) for each in raw]
        if all(isinstance(each, list) for each in raw):
            return [self._checked(each) for each in raw]
        return [self._checked(raw)]

    def of_messages(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Ids of a conversation up to where the model answers."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise ApiError(400, "this model has no chat template; use /v1/completions", param="messages")
        try:
            text: str = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template raises what it likes at roles or orders it does not know
            reason = " ".join(str(error).split())[:200]
            raise ApiError(400, f"messages do not fit the model's chat template: {reason}", param="messages") from error
        with self._one:
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _checked(self, ids: list[Any]) -> list[int]:
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocabulary:
                last = self.vocabulary - 1
                raise ApiError(400, f"prompt has the token id {token!r:.20}, needs 0 to {last}", param="prompt")
        if not ids:
            raise ApiError(400, "prompt is empty", param="prompt")
        return ids


def parse_messages(raw: Any) -> list[dict[str, str]]:
    """Messages with plain texts: content parts are joined, "developer" is the system's new name."""
    if not isinstance(raw, list) or not raw:
        raise ApiError(400, "messages needs an array of at least one message", param="messages")
    return [_message(each, f"messages[{i}]") for i, each in enumerate(raw)]


def _message(raw: Any, where: str) -> dict[str, str]:
    fields = Fields(raw, where)
    role = fields.required("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise fields.wrong("role", role, f"one of {', '.join(_ROLES)}")
    content = fields.raw("content", "")
    fields.text("name")
    fields.inert("refusal")
    fields.inert("tool_calls", [])
    fields.inert("function_call")
    fields.inert("audio")
    fields.raw("annotations")
    fields.finish()
    return {"role": _ROLES[role], "content": _content(content, f"{where}.content")}


def _content(raw: Any, where: str) -> str:
    if isinstance(raw, str):
        return raw
    if not isinstance(raw, list):
        raise ApiError(400, f"{where} needs a string or an array of content parts", param=where)
    texts = []
    for i, part in enumerate(raw):
        fields = Fields(part, f"{where}[{i}]")
        kind = fields.required("type")
        if kind != "text":
            raise ApiError(400, f"{where}[{i}].type is {kind!r:.30}, this model takes text only", param=f"{where}[{i}]")
        text = fields.required("text")
        if not isinstance(text, str):
            raise fields.wrong("text", text, "a string")
        fields.finish()
        texts.append(text)
    return "".join(texts)
