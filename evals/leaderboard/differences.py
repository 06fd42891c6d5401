"""Where two decoded JSON values differ, by the path of the field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Difference:
    """The first thing that is not as recorded: which cell, which field, both values."""

    where: str
    field: str
    recorded: Any
    found: Any

    def __str__(self) -> str:
        return f"{self.where}: {self.field} was {short(self.recorded)}, is {short(self.found)}"


def differences(old: Any, new: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every (field, old value, new value) at which two decoded JSON values differ, in order of field."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new}):
            yield from differences(old.get(key), new.get(key), f"{name}.{key}" if name else key)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for place, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from differences(before, after, f"{name}[{place}]")
    elif old != new or type(old) is not type(new):
        yield name, old, new


def short(value: Any) -> str:
    """As JSON, cut where a reader has seen enough."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else f"{text[:200]}..."
