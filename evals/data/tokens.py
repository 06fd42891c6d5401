"""Token ids for suites: pieces encoded once, one BOS at most, the chat template cut into ids once.

The template is rendered with placeholder contents and taken apart, so that any tokenizer with a template works and no
text is ever decoded and encoded again. A tokenizer without a template (a base model) gets plain ``User:`` /
``Assistant:`` lines.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from textwrap import shorten
from typing import Any

from kvgate.evals.data.items import Ids

# Some templates print today's date unless they are given one; items must not change from day to day.
DEFAULT_DATE = "2024-07-26"
_SYSTEM, _FIRST, _REPLY, _SECOND = "Qsystemq", "Qfirstq", "Qreplyq", "Qsecondq"
# Pieces continue a text, but SentencePiece tokenizers put a space in front of whatever they encode first.
_ANCHOR = "\n"


@dataclass(frozen=True)
class Chat:
    """A conversation's template, in ids.

    Attributes:
        opening: everything before the first user text when no system text is given (BOS, the template's own one).
        system_open, system_close: before and after a system text; after ``system_close`` the first user text follows.
        speak: from the end of a user text to the point where the model answers.
        scripted: the same, before an answer that is already part of the history (differs in thinking templates).
        next_user: from the end of an answer to the next user text.
        templated: False for the plain-text fallback.
    """

    opening: Ids
    system_open: Ids
    system_close: Ids
    speak: Ids
    scripted: Ids
    next_user: Ids
    templated: bool

    def start(self, system: Ids | None = None) -> Ids:
        """Ids up to the first user text."""
        return self.opening if system is None else self.system_open + system + self.system_close


class Tokens:
    """What suites need of a tokenizer.

    Args:
        tokenizer: any Hugging Face tokenizer. Only ``encode``, ``apply_chat_template`` and ``chat_template`` are used.
        date: the day that a template which prints one is told, as YYYY-MM-DD.
    """

    def __init__(self, tokenizer: Any, date: str = DEFAULT_DATE) -> None:
        self.tokenizer = tokenizer
        self.date = date
        self._cache: dict[str, Ids] = {}
        self._anchor = self._raw(_ANCHOR)
        self._anchored = self._raw(_ANCHOR + "word") != self._anchor + self._raw("word")

    def _raw(self, text: str) -> Ids:
        return tuple(int(token) for token in self.tokenizer.encode(text, add_special_tokens=False))

    def encode(self, text: str) -> Ids:
        """Ids of a piece that continues a text: no BOS, no invented space in front."""
        if text not in self._cache:
            self._cache[text] = self.fresh(text)
        return self._cache[text]

    def fresh(self, text: str) -> Ids:
        """As :meth:`encode`, not kept: for long texts that come once."""
        if not text or not self._anchored:
            return self._raw(text) if text else ()
        ids = self._raw(_ANCHOR + text)
        # A text that starts with newlines may merge with the anchor; then its own encoding is the best there is.
        return ids[len(self._anchor) :] if ids[: len(self._anchor)] == self._anchor else self._raw(text)

    @cached_property
    def bos(self) -> Ids:
        """The id the tokenizer itself puts before plain text: one or none."""
        plain, full = self._raw("word"), self.tokenizer.encode("word")
        return (int(full[0]),) if len(full) > len(plain) and full[0] != plain[0] else ()

    def join(self, *pieces: str | Sequence[int]) -> Ids:
        """Pieces one after another; strings are encoded by themselves."""
        ids: list[int] = []
        for piece in pieces:
            ids.extend(self.encode(piece) if isinstance(piece, str) else piece)
        return tuple(ids)

    @cached_property
    def line_ends(self) -> Ids:
        """Ids of single tokens that end a line, alone or with the mark before it."""
        return self._single("\n", "\n\n", ".\n", ".\n\n")

    @cached_property
    def sentence_ends(self) -> Ids:
        """As :attr:`line_ends`, and the full stop."""
        return self.line_ends + self._single(".")

    def _single(self, *texts: str) -> Ids:
        return tuple(self.encode(text)[0] for text in texts if len(self.encode(text)) == 1)

    def check(self, ids: Ids) -> Ids:
        """``ids`` again, once it is sure that a BOS stands at most once and only in front."""
        if self.bos and self.bos[0] not in self.chat.speak + self.chat.next_user:
            assert self.bos[0] not in ids[1:], "a second BOS inside an item"
        return ids

    @cached_property
    def chat(self) -> Chat:
        """The chat template in ids, or the plain fallback."""
        return self._templated() if getattr(self.tokenizer, "chat_template", None) else self._plain()

    def _plain(self) -> Chat:
        user, speak = self.encode("User: "), self.encode("\nAssistant:")
        return Chat(
            opening=self.bos + user,
            system_open=self.bos,
            system_close=self.join("\n\n", user),
            speak=speak,
            scripted=speak,
            next_user=self.join("\n\n", user),
            templated=False,
        )

    def _templated(self) -> Chat:
        first = _message("user", _FIRST)
        opening, speak = _cut(self._render([first], True), _FIRST)
        with_reply = [first, _message("assistant", _REPLY), _message("user", _SECOND)]
        _, scripted, next_user, _ = _cut(self._render(with_reply, True), _FIRST, _REPLY, _SECOND)
        system = self._system(opening)
        return Chat(
            opening=self.encode(opening),
            system_open=self.encode(system[0]),
            system_close=self.encode(system[1]),
            speak=self.encode(speak),
            scripted=self.encode(scripted),
            next_user=self.encode(next_user),
            templated=True,
        )

    def _system(self, opening: str) -> tuple[str, str]:
        """Text before and after a system text; templates that know no system role get it before the first user text."""
        try:
            text = self._render([_message("system", _SYSTEM), _message("user", _FIRST)], True)
        except ValueError:
            return opening, "\n\n"
        if _SYSTEM not in text:
            return opening, "\n\n"
        before, between, _ = _cut(text, _SYSTEM, _FIRST)
        return before, between

    def _render(self, messages: list[dict[str, str]], speak: bool) -> str:
        return render_chat(self.tokenizer, messages, self.date, add_generation_prompt=speak)


def render_chat(tokenizer: Any, messages: list[dict[str, str]], date: str, **options: Any) -> str:
    """``messages`` as the tokenizer's chat template writes them on ``date``. ValueError, one line, if the template does
    not compile or raises: it is a program that came with the model.
    """
    told = dated(tokenizer, date)
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, enable_thinking=False, **told, **options)
    except Exception as error:
        reason = shorten(" ".join(str(error).split()) or "no reason given", 200)
        raise ValueError(
            f"tokenizer: its chat template fails ({type(error).__name__}: {reason}); repair chat_template"
        ) from error
    return text


# Templates that ask transformers for today's date call this function, which is then the one of the template's own text.
_TODAY = "{% macro strftime_now(format) %}{{ written_dates[format] }}{% endmacro %}{{ '' }}"


def dated(tokenizer: Any, date: str) -> dict[str, Any]:
    """Arguments of ``apply_chat_template`` with which the template prints ``date`` (YYYY-MM-DD) and no other.

    ``date_string`` is what Llama 3 templates ask for; others call ``strftime_now``. ValueError where such a call has a
    format that is no plain text.
    """
    day = datetime.strptime(date, "%Y-%m-%d")
    told: dict[str, Any] = {"date_string": day.strftime("%d %b %Y")}
    template = tokenizer.get_chat_template() if getattr(tokenizer, "chat_template", None) else ""
    calls = template.count("strftime_now(")
    formats = re.findall(r"""strftime_now\(\s*(?:format\s*=\s*)?("[^"]*"|'[^']*')\s*\)""", template)
    if not calls:
        return told
    if len(formats) != calls:
        raise ValueError(
            "tokenizer: its chat template writes the date in a way that cannot be read; give it a plain format"
        )
    written = {text[1:-1]: day.strftime(text[1:-1]) for text in formats}
    return told | {"chat_template": _TODAY + template, "written_dates": written}


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _cut(text: str, *marks: str) -> list[str]:
    """``text`` split at each mark. ValueError if the template drops or repeats a content."""
    pieces = []
    for mark in marks:
        before, found, text = text.partition(mark)
        if not found or mark in text:
            raise ValueError(
                "tokenizer: its chat template drops or repeats message contents; use a tokenizer without one"
            )
        pieces.append(before)
    return [*pieces, text]
