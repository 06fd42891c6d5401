"""Short names of leaderboard rows, for tables and figures only: commands and files use the label."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

SYMBOLS = {"enable": "✔", "block": "✖", "inconclusive": "?", "not_evaluable": "–", "invalid": "!"}


@dataclass(frozen=True)
class ShortName:
    """ "streaming_llm", "rebased", "50 %"."""

    policy: str
    mode: str
    budget: str

    @property
    def family(self) -> str:
        """Without the budget."""
        return f"{self.policy} {self.mode}".strip()

    def __str__(self) -> str:
        return f"{self.family} {self.budget}"


def short_names(rows: Iterable[Mapping[str, Any]]) -> dict[str, ShortName]:
    """Label to short name. Two policies that would look alike keep their whole names."""
    heads = {row["label"]: row["label"].rpartition("@")[0] for row in rows}
    budgets = {row["label"]: _budget(row) for row in rows}
    short = {head: _split(head) for head in heads.values()}
    spoken = [" ".join(parts) for parts in short.values()]
    for head, parts in short.items():
        if spoken.count(" ".join(parts)) > 1:
            short[head] = (head, "")
    return {label: ShortName(*short[head], budgets[label]) for label, head in heads.items()}


def verdict_text(status: str) -> str:
    """ "not evaluable"."""
    return status.replace("_", " ")


def printable(text: str) -> str:
    """Model output for readers: line breaks as ⏎, other control and direction marks as escapes."""
    return "".join(_visible(char) for char in text)


def _visible(char: str) -> str:
    if char == "\n":
        return "⏎"
    if char.isprintable():
        return char
    return f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\u{ord(char):04x}"


def _split(head: str) -> tuple[str, str]:
    name, _, params = head.removesuffix(")").partition("(")
    pairs = (part.partition("=") for part in params.split(",") if part)
    return name, " ".join(value if value.isalpha() else f"{key} {value}".strip() for key, _, value in pairs)


def _budget(row: Mapping[str, Any]) -> str:
    return f"{row['budget']:.0f} tok" if row["ratio"] is None else f"{100 * row['ratio']:.4g} %"
