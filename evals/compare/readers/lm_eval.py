"""lm-eval's ``samples_<task>_<date>.jsonl``: a file, or a folder of them (``--log_samples --output_path``)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvgate.evals.compare.readers.side import Entry, Side, in_range
from kvgate.typed import MIB, decode_json, read_text

LARGEST = 4096 * MIB
HASHES = ("doc_hash", "prompt_hash", "target_hash")
_NAME = re.compile(r"samples_(?P<task>.+?)(_\d{4}-\d{2}-\d{2}T[^/]*)?\.jsonl")


def is_samples(path: Path) -> bool:
    """Whether a path looks like lm-eval's samples."""
    return bool(_NAME.fullmatch(path.name)) or (path.is_dir() and any(path.rglob("samples_*.jsonl")))


def read_samples(path: Path, metric: str | None) -> Side:
    """Every document under every filter, by task; ``metric``: the one that is judged, None: the first in [0, 1].

    ValueError where a task has two files (several runs in one folder), hashes are missing, or no metric is in [0, 1].
    """
    files = sorted(path.rglob("samples_*.jsonl")) if path.is_dir() else [path]
    found: dict[tuple[str, str], Entry] = {}
    for file in files:
        named = _NAME.fullmatch(file.name)
        task = named["task"] if named else file.stem
        if any(key[0].partition(",")[0] == task for key in found):
            raise ValueError(f"{path}: task {task} has several sample files; name the folder of one run")
        found.update(_task(file, task, metric))
    return found


def _task(file: Path, task: str, metric: str | None) -> dict[tuple[str, str], Entry]:
    found: dict[tuple[str, str], Entry] = {}
    chosen: dict[str, str] = {}
    lines = [line for line in read_text(file, LARGEST).split("\n") if line.strip()]
    rows = [
        (f"{file}, line {number}", decode_json(line, f"{file}, line {number}")) for number, line in enumerate(lines, 1)
    ]
    filters = {row.get("filter") for _, row in rows if isinstance(row, dict)}
    for where, row in rows:
        if not isinstance(row, dict) or not isinstance(row.get("doc_id"), int):
            raise ValueError(f"{where}: not one of lm-eval's samples; doc_id is missing")
        hashes = {name: row[name] for name in HASHES if isinstance(row.get(name), str)}
        if len(hashes) < len(HASHES):
            raise ValueError(
                f"{where}: {', '.join(sorted(set(HASHES) - set(hashes)))} missing; use lm-eval 0.4.3 or later"
            )
        chain = str(row.get("filter", "none"))
        name = chosen.setdefault(chain, metric or _metric(row, where))
        key = (f"{task},{chain}" if len(filters) > 1 else task, str(row["doc_id"]))
        if key in found:
            raise ValueError(f"{where}: document {row['doc_id']} under filter {chain} comes twice")
        found[key] = Entry(in_range(row.get(name), name, where), None, {**hashes, "filter": chain, "metric": name})
    return found


def _metric(row: Mapping[str, Any], where: str) -> str:
    known = [name for name in row.get("metrics") or [] if isinstance(name, str)]
    fit = [name for name in known if isinstance(row.get(name), int | float) and 0.0 <= row[name] <= 1.0]
    if not fit:
        raise ValueError(
            f"{where}: no metric in [0, 1] among {', '.join(known) or 'none'}; a score that is best when high is "
            "needed: name one with --metric"
        )
    return fit[0]
