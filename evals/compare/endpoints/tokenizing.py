"""Token ids for prompts of stated lengths: by a tokenizer that is here, or by the one that the endpoint serves."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from kvgate.evals.compare.endpoints.client import EndpointClient
from kvgate.evals.data.items import Ids
from kvgate.evals.data.tokens import Chat, Tokens

# Above any vocabulary: they mark where a role begins and never reach an endpoint.
SYSTEM, USER, ASSISTANT = ((1 << 40) + rank for rank in range(3))
MARKS = {SYSTEM: "system", USER: "user", ASSISTANT: "assistant"}


class EndpointTokenizer:
    """The served model's own tokenizer, through ``/tokenize`` and ``/detokenize`` (vLLM's form or llama.cpp's).

    It knows no chat template: completions get plain ``User:`` lines. ValueError where the endpoint offers neither.
    """

    chat_template = None

    def __init__(self, client: EndpointClient) -> None:
        self._client = client
        self._plain = self._ask_plain("word", False) is not None
        if not self._plain and self._ask_content("word", False) is None:
            raise ValueError(
                f"endpoint {client.endpoint.url}: offers no /tokenize; name its model's tokenizer with --tokenizer"
            )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``. ValueError if the endpoint stops answering."""
        ask = self._ask_plain if self._plain else self._ask_content
        ids = ask(text, add_special_tokens)
        if ids is None:
            raise ValueError(f"endpoint {self._client.endpoint.url}: /tokenize gave no tokens; see its log")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids."""
        if not ids:
            return ""
        if self._plain:
            found = self._client.post("/detokenize", {"model": self._client.model, "tokens": list(ids)})
            return str(found["prompt"])
        return str(self._client.post("/detokenize", {"tokens": list(ids)})["content"])

    def _ask_plain(self, text: str, special: bool) -> list[int] | None:
        body = {"model": self._client.model, "prompt": text, "add_special_tokens": special}
        return _tokens(self._client.post("/tokenize", body))

    def _ask_content(self, text: str, special: bool) -> list[int] | None:
        return _tokens(self._client.post("/tokenize", {"content": text, "add_special": special}))


def _tokens(answer: Any) -> list[int] | None:
    ids = answer.get("tokens") if isinstance(answer, dict) else None
    if not isinstance(ids, list) or not ids or not all(isinstance(token, int) for token in ids):
        return None
    return ids


class MessageTokens(Tokens):
    """Tokens whose chat template is marks between roles, to be cut into the messages of a chat endpoint."""

    @cached_property
    def bos(self) -> Ids:
        """None: the endpoint's template brings its own."""
        return ()

    @cached_property
    def chat(self) -> Chat:
        """One mark where a role begins."""
        return Chat(
            opening=(USER,), system_open=(SYSTEM,), system_close=(USER,), speak=(ASSISTANT,), scripted=(ASSISTANT,),
            next_user=(USER,), templated=True,
        )  # fmt: skip


def load_tokenizer(name: str) -> Any:
    """A tokenizer by folder, hub id, or ``embedded``. ValueError if it cannot be loaded."""
    import transformers

    from kvgate.engine.embedded import EMBEDDED, embedded_folder

    source = str(embedded_folder()) if name == EMBEDDED else name
    try:
        return transformers.AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"--tokenizer {name!r}: {reason}; use a folder, a hub id or 'embedded'") from error
