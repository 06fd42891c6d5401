"""Token ids to text as they come: no broken characters, nothing of a stop text."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

_BROKEN = "�"
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


class Detokenizer:
    """The text of a growing list of ids, piece by piece. A character is given out once all of its bytes are there."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # what is decoded again for context
        self._given = 0  # ids whose text was given out

    def push(self, token: int) -> str:
        """The text that ``token`` completes, often its own."""
        self._ids.append(token)
        before, now = self._decode(self._given), self._decode(len(self._ids))
        if len(now) <= len(before) or now.endswith(_BROKEN):
            return ""
        self._start, self._given = self._given, len(self._ids)
        return now[len(before) :]

    def flush(self) -> str:
        """What is left at the end, broken characters included."""
        text = self._decode(len(self._ids))[len(self._decode(self._given)) :]
        self._start = self._given = len(self._ids)
        return text

    def _decode(self, end: int) -> str:
        text: str = self._tokenizer.decode(
            self._ids[self._start : end], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


class StopTexts:
    """Cuts a stream of text before the first stop text; holds back what may turn out to begin one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """What is certain to stand before any stop text."""
        if self.stopped:
            return ""
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped = True
            out, self._held = self._held[: min(found)], ""
            return out
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out

    def flush(self) -> str:
        """What was held back, since no stop text came."""
        out, self._held = self._held, ""
        return out


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop``."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0


class Pieces:
    """Single tokens as text and bytes, for log-probabilities."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self._byte_level = "Ġ" in "".join(tokenizer.convert_ids_to_tokens(list(range(min(1000, len(tokenizer))))))

    def bytes_of(self, token: int) -> bytes:
        """The token's own bytes, which need not be whole characters."""
        piece: str = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None or token in self._special:
            return (piece or "").encode()
        if self._byte_level and all(letter in _byte_letters() for letter in piece):
            return bytes(_byte_letters()[letter] for letter in piece)
        if match := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(match[1], 16)])
        return piece.replace("▁", " ").encode()

    def text_of(self, token: int) -> str:
        """The token as text; ``bytes:\\x..`` where its bytes are no whole characters, so that no two look alike."""
        raw = self.bytes_of(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


@cache
def _byte_letters() -> dict[str, int]:
    """Letters that byte-level BPE (GPT-2) writes bytes with: printable Latin-1 for itself, others from U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
