"""Asks an endpoint all turns of an item, and checks that nothing of its prompts was cut."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvgate.evals.compare.endpoints.client import EndpointClient, EndpointFailure, Reply
from kvgate.evals.compare.endpoints.conversation import chat, completion, cut, score
from kvgate.evals.data.items import Ids, Item, Turn
from kvgate.evals.data.tokens import Tokens

# Contents that are decoded and encoded again by the endpoint may come to a few tokens less.
SHRINKAGE = 0.95


@dataclass(frozen=True)
class AskedTurn:
    """One answered turn, as an endpoint gave it.

    Attributes:
        score: in [0, 1]; None for a filler turn.
        text: the answer up to the mark that ends it.
        prompt_tokens: what the endpoint counted; None where it does not say, and then nobody knows if it cut.
        sent_tokens: what was sent.
        capped: the answer ended at its token limit.
    """

    label: str
    score: float | None
    text: str
    prompt_tokens: int | None
    sent_tokens: int
    capped: bool


class Asker:
    """Asks items of one endpoint, one after another within an item; several items may be asked at once.

    Args:
        client: the endpoint.
        tokens: the tokenizer that the items were built with.
        as_ids: send token ids instead of text (completions only).
    """

    def __init__(self, client: EndpointClient, tokens: Tokens, as_ids: bool) -> None:
        self._client = client
        self._tokens = tokens
        self._as_ids = as_ids

    def ask(self, item: Item) -> tuple[AskedTurn, ...]:
        """All turns. EndpointFailure if one got no answer; ValueError if a prompt was cut."""
        ask: Callable[[Item, list[str], Turn], AskedTurn] = (
            self._chat if self._client.endpoint.api == "chat" else self._complete
        )
        texts: list[str] = []
        turns: list[AskedTurn] = []
        for turn in item.turns:
            turns.append(ask(item, texts, turn))
            texts.append(turns[-1].text)
        return tuple(turns)

    def _complete(self, item: Item, texts: list[str], turn: Turn) -> AskedTurn:
        request = completion(item, [self._encode(text) for text in texts])
        prompt: Any = request.ids if self._as_ids else self._text(request.ids)
        reply = self._client.complete(prompt, request.max_tokens)
        least = len(request.ids) if self._as_ids else int(len(request.ids) * SHRINKAGE)
        return self._turn(item, turn, reply, len(request.ids), least, "")

    def _chat(self, item: Item, texts: list[str], turn: Turn) -> AskedTurn:
        request = chat(item, texts, self._tokens.tokenizer.decode, self._encode)
        messages = [{"role": role, "content": content} for role, content in request.messages]
        reply = self._client.chat(messages, request.max_tokens)
        least = int(request.content_tokens * SHRINKAGE)
        return self._turn(item, turn, reply, request.content_tokens, least, request.prefix)

    def _turn(self, item: Item, turn: Turn, reply: Reply, sent: int, least: int, prefix: str) -> AskedTurn:
        if reply.prompt_tokens is not None and reply.prompt_tokens < least:
            raise ValueError(
                f"endpoint {self._client.endpoint.url}: cut the prompt of {item.suite}/{item.task} item {item.index} "
                f"({sent} tokens sent, {reply.prompt_tokens} counted); serve a longer context or plan shorter items"
            )
        if reply.finish not in ("stop", "length", None):
            raise EndpointFailure(f"finish_reason {reply.finish!r}")
        text = cut(reply.text, turn, self._tokens.tokenizer.decode)
        capped = reply.finish == "length" and text == reply.text
        return AskedTurn(turn.label, score(turn, text, prefix), text, reply.prompt_tokens, sent, capped)

    def _encode(self, text: str) -> Ids:
        return self._tokens.fresh(text)

    def _text(self, ids: Ids) -> str:
        text: str = self._tokens.tokenizer.decode(list(ids[len(self._tokens.bos) :] if self._has_bos(ids) else ids))
        return text

    def _has_bos(self, ids: Ids) -> bool:
        """A BOS in front is left to the endpoint, which puts its own there."""
        return bool(self._tokens.bos) and ids[: len(self._tokens.bos)] == self._tokens.bos


def takes_ids(client: EndpointClient, ids: Ids) -> bool:
    """Whether the endpoint takes token ids as prompts and counts them as sent."""
    if client.endpoint.api != "completions":
        return False
    try:
        reply = client.complete(ids, 1)
    except EndpointFailure:
        return False
    return reply.prompt_tokens is None or reply.prompt_tokens == len(ids)
