"""Workload files and public traces as arrival streams; every bad line is named in one line.

Formats: the project's own JSONL, Mooncake JSONL (512-token hash ids) and Azure CSV.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from kvgate.lifecycle.states import Spec
from kvgate.typed import MIB, STRICT, decode_json, parse, read_text

LARGEST = 1024 * MIB  # bytes of a file
MOST_TOKENS = 1 << 24  # of a prompt or an answer
LATEST = 1 << 53  # steps or milliseconds: whole numbers that a float still tells apart

MOONCAKE_BLOCK = 512


@dataclass(frozen=True)
class Arrival:
    """One request of a workload.

    Attributes:
        spec: what it asks for.
        at: arrival, in the workload's time unit (steps, or milliseconds for traces).
        out_len: tokens it generates before it stops by itself; only a simulator knows.
        cancel_at: when its caller gives up; None for never.
        blocks: ids of equal 512-token prefix blocks (Mooncake), empty otherwise.
    """

    spec: Spec
    at: float
    out_len: int
    cancel_at: float | None = None
    blocks: tuple[int, ...] = ()


Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Moment = Annotated[int, Field(ge=0, le=LATEST)]
Name = Annotated[str, Field(min_length=1, max_length=1000)]


@dataclass(frozen=True)
class OwnLine:
    """A line of the project's own JSONL. ``prefix_id`` and ``prefix_len``, which say what is shared, are not used."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = STRICT

    id: Name
    arrive_step: Moment
    prompt_len: Tokens
    out_len: Tokens
    max_tokens: Tokens
    tenant: Name = "default"
    priority: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    cancel_at_step: Moment | None = None
    prefix_id: str | None = None
    prefix_len: Annotated[int, Field(ge=0, le=MOST_TOKENS)] = 0

    def arrival(self, where: str) -> Arrival:
        """ValueError if it would say more than it may."""
        if self.out_len > self.max_tokens:
            raise ValueError(f"{where}: out_len {self.out_len} is over max_tokens {self.max_tokens}")
        spec = Spec(self.id, self.prompt_len, self.max_tokens, self.tenant, self.priority)
        return Arrival(spec, self.arrive_step, self.out_len, self.cancel_at_step)


@dataclass(frozen=True)
class MooncakeLine:
    """A line of a Mooncake trace; an answer without tokens counts as one."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = STRICT

    timestamp: Moment
    input_length: Tokens
    output_length: Annotated[int, Field(ge=0, le=MOST_TOKENS)]
    hash_ids: Annotated[tuple[Annotated[int, Field(ge=0, lt=1 << 63)], ...], Field(max_length=MOST_TOKENS)]

    def arrival(self, number: int) -> Arrival:
        """The request of line ``number``."""
        out = max(1, self.output_length)
        return Arrival(Spec(f"m{number}", self.input_length, out), self.timestamp, out, None, self.hash_ids)


def _jsonl(path: Path, text: str) -> list[Arrival]:
    arrivals: list[Arrival] = []
    kinds: set[bool] = set()
    for number, line in enumerate(text.split("\n"), 1):
        where = f"{path.name}:{number}"
        if not line.strip():
            continue
        row = decode_json(line, where)
        if not isinstance(row, dict):
            raise ValueError(f"{where}: needs an object, not {type(row).__name__}")
        kinds.add("hash_ids" in row)
        if len(kinds) > 1:
            raise ValueError(f"{where}: lines of a Mooncake trace and of an own workload in one file; split it")
        made = parse(MooncakeLine, row, where).arrival(number) if "hash_ids" in row else None
        arrivals.append(made or parse(OwnLine, row, where).arrival(where))
    return arrivals


def _azure(path: Path, text: str) -> list[Arrival]:
    arrivals: list[Arrival] = []
    start: datetime | None = None
    for number, row in enumerate(_table(path, text), 2):
        where = f"{path.name}:{number}"
        try:
            stamp = datetime.fromisoformat(row["TIMESTAMP"])
            prompt, out = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{where}: needs TIMESTAMP, ContextTokens, GeneratedTokens, got {str(dict(row))[:200]}"
            ) from error
        if not (1 <= prompt <= MOST_TOKENS and 0 <= out <= MOST_TOKENS):
            raise ValueError(f"{where}: lengths {prompt} and {out} need at least 1 and 0, and at most {MOST_TOKENS}")
        start = start or stamp
        if (stamp.tzinfo is None) != (start.tzinfo is None):
            raise ValueError(
                f"{where}: {row['TIMESTAMP']}: some lines have a time zone and some have none; give all one"
            )
        at = (stamp - start).total_seconds() * 1000.0
        arrivals.append(Arrival(Spec(f"a{number}", prompt, max(1, out)), at, max(1, out)))
    earliest = min((arrival.at for arrival in arrivals), default=0.0)
    return [replace(arrival, at=arrival.at - earliest) for arrival in arrivals]


def _table(path: Path, text: str) -> Iterator[dict[str, Any]]:
    try:
        yield from csv.DictReader(line.removesuffix("\r") for line in text.split("\n"))
    except csv.Error as error:
        raise ValueError(f"{path.name}: not a table: {error}") from error


def load_workload(path: Path) -> tuple[list[Arrival], str]:
    """Arrivals in order of time, and their time unit: "step" for own workloads, "ms" for traces.

    Times of a trace count from its earliest line. Raises ValueError naming file and line for anything malformed,
    duplicated or empty.
    """
    try:
        text = read_text(path, LARGEST)
    except ValueError as error:
        raise ValueError(f"{path.name!r:.200}: cannot be read: {error}") from error
    csv_like = path.suffix == ".csv"
    arrivals = _azure(path, text) if csv_like else _jsonl(path, text)
    if not arrivals:
        raise ValueError(f"{path.name}: no requests in it")
    seen: set[str] = set()
    for arrival in arrivals:
        if arrival.spec.id in seen:
            raise ValueError(f"{path.name}: request id {arrival.spec.id!r} appears twice")
        seen.add(arrival.spec.id)
    unit = "ms" if csv_like or bool(arrivals[0].blocks) else "step"
    return sorted(arrivals, key=lambda a: a.at), unit
