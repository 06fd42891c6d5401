"""Reads the fields of a request's JSON body one by one; what is left over is refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvgate.serving.errors import ApiError

_MISSING = object()


class Fields:
    """A JSON object being taken apart. Null counts as absent, as OpenAI's clients send it for unset parameters.

    Every method takes the field's name and returns its value or a default; ApiError 400 names what is wrong.
    """

    def __init__(self, body: Any, where: str = "") -> None:
        if not isinstance(body, Mapping):
            raise ApiError(400, f"{where or 'the body'} is {_kind(body)}, needs a JSON object", param=where or None)
        self._left = {str(name): value for name, value in body.items() if value is not None}
        self._where = where

    def raw(self, name: str, default: Any = None) -> Any:
        """Whatever stands there."""
        return self._left.pop(name, default)

    def required(self, name: str) -> Any:
        """Whatever stands there, which has to be something."""
        value = self._left.pop(name, _MISSING)
        if value is _MISSING:
            raise ApiError(400, f"you must provide a {self.path(name)} parameter", param=self.path(name))
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        """A finite number between ``low`` and ``high``, both allowed."""
        value = self._left.pop(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.wrong(name, value, "a finite number")
        if not low <= value <= high:
            raise self.wrong(name, value, f"a number between {low:g} and {high:g}")
        return float(value)

    def integer(self, name: str, default: int | None, low: int, high: int = 2**63 - 1) -> int | None:
        """An integer between ``low`` and ``high``, both allowed."""
        value = self._left.pop(name, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(
                name, value, f"an integer of at least {low}" + (f", at most {high}" if high < 2**62 else "")
            )
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self._left.pop(name, default)
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str | None:
        """A string."""
        value = self._left.pop(name, default)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, value, "a string")
        return value

    def inert(self, name: str, *allowed: Any) -> None:
        """A parameter that kvgate does not have; values that change nothing are accepted."""
        value = self._left.pop(name, None)
        if value is not None and value not in allowed:
            raise ApiError(
                400, f"{self.path(name)} is not supported", param=self.path(name), code="unsupported_parameter"
            )

    def finish(self) -> None:
        """ApiError if a field is left that nobody asked for."""
        if self._left:
            name = self.path(min(self._left))
            raise ApiError(400, f"Unrecognized request argument supplied: {name}", param=name, code="unknown_parameter")

    def wrong(self, name: str, value: Any, needs: str) -> ApiError:
        """A 400 that names the field, what it has and what it needs."""
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:60] + "..."
        return ApiError(400, f"{self.path(name)} is {shown}, needs {needs}", param=self.path(name))

    def path(self, name: str) -> str:
        """The field's full name."""
        return f"{self._where}.{name}" if self._where else name


def _kind(value: Any) -> str:
    return {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "a number")
