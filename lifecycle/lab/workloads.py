"""Workload files and public traces as arrival streams; every bad line is named in one line.

Formats: the project's own JSONL, Mooncake JSONL (512-token hash ids) and Azure CSV.
"""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from kvgate.lifecycle.states import Spec

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


def _integer(row: dict[str, Any], key: str, where: str, low: int) -> int:
    value = row.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ValueError(f"{where}: {key} is {value!r}, needs an integer of at least {low}")
    return value


def _own_row(row: dict[str, Any], where: str) -> Arrival:
    cancel = row.get("cancel_at_step")
    out_len = _integer(row, "out_len", where, 1)
    max_tokens = _integer(row, "max_tokens", where, 1)
    if out_len > max_tokens:
        raise ValueError(f"{where}: out_len {out_len} is over max_tokens {max_tokens}")
    identifier, tenant = row.get("id"), row.get("tenant", "default")
    if not isinstance(identifier, str) or not isinstance(tenant, str):
        raise ValueError(f"{where}: id and tenant need to be strings, not {identifier!r} and {tenant!r}")
    spec = Spec(
        identifier,
        _integer(row, "prompt_len", where, 1),
        max_tokens,
        tenant,
        _integer(row, "priority", where, 0) if "priority" in row else 0,
    )
    at = _integer(row, "arrive_step", where, 0)
    return Arrival(spec, at, out_len, None if cancel is None else _integer(row, "cancel_at_step", where, 0))


def _mooncake_row(row: dict[str, Any], where: str, index: int) -> Arrival:
    hashes = row.get("hash_ids")
    if not isinstance(hashes, list) or not all(isinstance(h, int) and h >= 0 for h in hashes):
        raise ValueError(f"{where}: hash_ids needs a list of non-negative integers")
    out = max(1, _integer(row, "output_length", where, 0))
    spec = Spec(f"m{index}", _integer(row, "input_length", where, 1), out)
    return Arrival(spec, _integer(row, "timestamp", where, 0), out, None, tuple(hashes))


def _jsonl(path: Path, lines: list[str]) -> list[Arrival]:
    arrivals: list[Arrival] = []
    for number, line in enumerate(lines, 1):
        where = f"{path.name}:{number}"
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where}: not JSON ({error.msg} at column {error.colno})") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where}: needs an object, not {type(row).__name__}")
        arrivals.append(_mooncake_row(row, where, number) if "hash_ids" in row else _own_row(row, where))
    return arrivals


def _azure(path: Path, lines: list[str]) -> list[Arrival]:
    arrivals: list[Arrival] = []
    start: datetime | None = None
    for number, row in enumerate(csv.DictReader(lines), 2):
        where = f"{path.name}:{number}"
        try:
            # Seven fractional digits in the files; datetime takes six.
            stamp = datetime.fromisoformat(row["TIMESTAMP"][:26])
            prompt, out = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{where}: needs TIMESTAMP, ContextTokens, GeneratedTokens, got {dict(row)}") from error
        if prompt < 1 or out < 0:
            raise ValueError(f"{where}: lengths {prompt} and {out} need at least 1 and 0")
        start = start or stamp
        at = (stamp - start).total_seconds() * 1000.0
        arrivals.append(Arrival(Spec(f"a{number}", prompt, max(1, out)), at, max(1, out)))
    return arrivals


def load_workload(path: Path) -> tuple[list[Arrival], str]:
    """Arrivals in order of time, and their time unit: "step" for own workloads, "ms" for traces.

    Raises ValueError naming file and line for anything malformed, duplicated or empty.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path.name}: cannot be read: {error}") from error
    csv_like = path.suffix == ".csv"
    arrivals = _azure(path, lines) if csv_like else _jsonl(path, lines)
    if not arrivals:
        raise ValueError(f"{path.name}: no requests in it")
    seen: set[str] = set()
    for arrival in arrivals:
        if arrival.spec.id in seen:
            raise ValueError(f"{path.name}: request id {arrival.spec.id!r} appears twice")
        seen.add(arrival.spec.id)
    unit = "ms" if csv_like or bool(arrivals[0].blocks) else "step"
    return sorted(arrivals, key=lambda a: a.at), unit
