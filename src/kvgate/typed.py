"""Outside files and options to typed, frozen dataclasses: the one reader of all rooms.

Text is read with a limit on its size, decoded with a limit on its nesting, and validated by pydantic in strict mode
against the dataclass that the code uses: no value changes its type, no unknown key is passed over, no number is
infinite. Whatever is wrong is a ValueError of one line that names the file, the field, the value and the remedy.
"""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

STRICT: Mapping[str, Any] = {"extra": "forbid", "strict": True, "allow_inf_nan": False}
"""``__pydantic_config__`` of a dataclass that is read from outside."""

DEEPEST = 64  # levels of nesting
MIB = 1 << 20

Kind = TypeVar("Kind")


def read_bytes(path: Path, limit: int, what: str = "") -> bytes:
    """A file's bytes. ValueError where there is no such file, a folder, no permission, or more than ``limit`` bytes."""
    name = f"{what} {str(path)[:200]}".strip()
    try:
        if path.is_dir():
            raise ValueError(f"{name}: is a folder; name a file")
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise ValueError(f"{name}: {error.strerror or error}") from error
    except ValueError as error:  # a null byte in the name
        raise ValueError(str(error) if str(error).startswith(name) else f"{what} {str(path)!r}: {error}") from error
    if len(data) > limit:
        raise ValueError(f"{name}: larger than {limit / MIB:g} MiB; give a smaller file")
    return data


def read_text(path: Path, limit: int, what: str = "") -> str:
    """As :func:`read_bytes`, decoded as UTF-8; a byte order mark in front is dropped."""
    try:
        return read_bytes(path, limit, what).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{what} {path}: not UTF-8 text at byte {error.start}".strip()) from error


def is_file(name: str | Path) -> bool:
    """Whether there is such a file; False for a name that no file can have."""
    return _there(name, Path.is_file)


def is_folder(name: str | Path) -> bool:
    """Whether there is such a folder; False for a name that no folder can have."""
    return _there(name, Path.is_dir)


def _there(name: str | Path, asked: Callable[[Path], bool]) -> bool:
    try:
        return asked(Path(name))
    except (OSError, ValueError):
        return False


def decode_json(text: str | bytes, where: str) -> Any:
    """Plain data from one JSON document. Not NaN, not infinite, no key twice, at most :data:`DEEPEST` levels."""
    try:
        found = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_once)
        check_depth(found)
    except RecursionError as error:
        raise ValueError(f"{where}: nested too deeply; at most {DEEPEST} levels are read") from error
    except ValueError as error:
        raise ValueError(f"{where}: not JSON that is read here: {_short(' '.join(str(error).split()))}") from error
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r} stands twice")
    return found


def check_depth(value: Any) -> None:
    """ValueError for data of more than :data:`DEEPEST` levels."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > DEEPEST:
            raise ValueError(f"nested too deeply; at most {DEEPEST} levels are read")
        level = [inner for outer in level for inner in _inside(outer) if isinstance(inner, dict | list | tuple)]


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple):
        yield from value


def parse(kind: type[Kind], raw: Any, where: str) -> Kind:
    """Plain data (of YAML or JSON) as ``kind``. ValueError names the field, its value and what is expected.

    Validated as JSON, in which lists are tuples and keys are texts; dates and the like, which YAML knows, are refused.
    """
    try:
        check_depth(raw)
        text = json.dumps(_plain(raw, where))
    except ValueError as error:
        raise ValueError(f"{where}: {error}" if not str(error).startswith(where) else str(error)) from error
    return _validated(kind, lambda adapter: adapter.validate_json(text, strict=True), where)


def parse_json(kind: type[Kind], data: str | bytes, where: str) -> Kind:
    """One JSON document as ``kind``: quicker than :func:`decode_json` and :func:`parse`; for lines of large files."""
    return _validated(kind, lambda adapter: adapter.validate_json(data, strict=True), where)


def _validated(kind: type[Kind], validate: Callable[[TypeAdapter[Kind]], Kind], where: str) -> Kind:
    try:
        return validate(_adapter(kind))  # type: ignore[arg-type]  # types are hashable
    except ValidationError as error:
        raise ValueError(f"{where}: {_first(kind, error)}") from error


@cache
def _adapter(kind: type[Kind]) -> TypeAdapter[Kind]:
    return TypeAdapter(kind)


def _plain(value: Any, where: str) -> Any:
    """What JSON can say, keys as text. ValueError for anything else."""
    if isinstance(value, Mapping):
        found: dict[str, Any] = {}
        for key, inner in value.items():
            name = str(key) if isinstance(key, str | int) and not isinstance(key, bool) else None
            if name is None or name in found:
                raise ValueError(f"{where}: key {_short(repr(key))} {'stands twice' if name else 'is no name'}")
            found[name] = _plain(inner, f"{where}: {name}")
        return found
    if isinstance(value, list | tuple):
        return [_plain(inner, where) for inner in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    raise ValueError(f"{where} is {_short(repr(value))}; give a text, a number, a list or a mapping")


def _first(kind: Any, error: ValidationError) -> str:
    """The first fault: an unknown key before anything else, since a misspelt one also leaves its field missing."""
    faults = error.errors(include_url=False)
    unknown = [fault for fault in faults if fault["type"] in ("unexpected_keyword_argument", "extra_forbidden")]
    fault = (unknown or faults)[0]
    path = [part for part in fault["loc"] if not _is_branch(part)]
    name = _joined(path)
    if unknown:
        parent, key = _joined(path[:-1]), path[-1]
        known = ", ".join(_known(kind, path[:-1]))
        return f"{parent + ': ' if parent else ''}unknown key {_short(repr(key))}{'; known: ' + known if known else ''}"
    if fault["type"] == "missing":
        return f"{name} is missing"
    message = fault["msg"][0].lower() + fault["msg"][1:]
    message = (
        message.removeprefix("value error, ")
        .replace("input should be", "give")
        .replace("give an object", "give a mapping")
        .replace("tuple", "list")
    )
    return f"{name} is {_short(repr(fault['input']))}; {_short(message, 300)}" if name else _short(message, 300)


def _is_branch(part: Any) -> bool:
    """Whether part of a fault's place is the name of a branch of a union, not a key."""
    return isinstance(part, str) and (part in _BRANCHES or "[" in part or "Literal" in part)


_BRANCHES = {"int", "float", "str", "bool", "none", "constrained-int", "constrained-float", "constrained-str", "[key]"}


def _joined(path: list[Any]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f"{'.' if text else ''}{_short(str(part))}"
    return text


def _known(kind: Any, path: list[Any]) -> list[str]:
    """Field names of the dataclass at ``path``, if that can be told."""
    for part in path:
        kind = _dataclass_in(kind)
        if kind is None:
            return []
        if isinstance(part, str) and part in {spec.name for spec in dataclasses.fields(kind)}:
            kind = get_type_hints(kind)[part]
    kind = _dataclass_in(kind)
    return [] if kind is None else [spec.name for spec in dataclasses.fields(kind) if spec.init]


def _dataclass_in(hint: Any) -> Any:
    """The dataclass in a hint such as ``tuple[X, ...] | None`` or ``Mapping[str, X]``."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return hint
    if get_origin(hint) in (Union, types.UnionType, tuple, list, dict, Mapping) or get_args(hint):
        return next((found for inner in get_args(hint) if (found := _dataclass_in(inner)) is not None), None)
    return None


def _short(text: str, most: int = 80) -> str:
    return text if len(text) <= most else f"{text[:most]}..."
