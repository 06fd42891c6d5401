"""inspect_ai's logs: ``.eval`` (a zip of JSON members, zstd or deflated) and ``.json``."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvgate.evals.compare.readers.side import Entry, Side, in_range
from kvgate.typed import MIB, decode_json, read_bytes

LARGEST, LARGEST_MEMBER = 4096 * MIB, 512 * MIB
ZSTANDARD = 93
VALUES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}
"""inspect_ai's letters: correct, partial, incorrect, no answer."""


def read_log(path: Path, metric: str | None) -> Side:
    """Every sample and epoch of a log; ``metric``: the scorer, or "scorer/key", that is judged; None: the only one.

    Epochs of a sample are one cluster. ValueError names what is missing.
    """
    header, samples = _opened(path)
    task = str(_mapping(header.get("eval"), f"{path}: eval").get("task") or path.stem)
    found: dict[tuple[str, str], Entry] = {}
    for sample in samples:
        name, epoch = str(sample.get("id")), str(sample.get("epoch", 1))
        where = f"{path}: sample {name}, epoch {epoch}"
        if (task, f"{name}#{epoch}") in found:
            raise ValueError(f"{where}: comes twice")
        identity = {"input": repr(sample.get("input")), "target": repr(sample.get("target"))}
        found[task, f"{name}#{epoch}"] = Entry(_score(sample, metric, where), name, identity)
    if not found:
        raise ValueError(f"{path}: has no samples; log them (inspect_ai: log_samples)")
    return found


def _opened(path: Path) -> tuple[Mapping[str, Any], Iterator[Mapping[str, Any]]]:
    if path.suffix == ".json":
        log = _mapping(decode_json(read_bytes(path, LARGEST), str(path)), str(path))
        return log, (_mapping(sample, f"{path}: samples") for sample in log.get("samples") or [])
    try:
        archive = zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: not one of inspect_ai's .eval logs: {error}") from error
    names = [info.filename for info in archive.infolist()]
    if "header.json" not in names:
        raise ValueError(f"{path}: has no header.json; the evaluation did not finish, or it is no log of inspect_ai")
    header = _mapping(_member(archive, "header.json", path), f"{path}: header.json")
    members = sorted(name for name in names if name.startswith("samples/") and name.endswith(".json"))
    return header, (_mapping(_member(archive, name, path), f"{path}: {name}") for name in members)


def _member(archive: zipfile.ZipFile, name: str, path: Path) -> Any:
    info = archive.getinfo(name)
    if info.file_size > LARGEST_MEMBER:
        raise ValueError(f"{path}: {name} has {info.file_size} bytes; at most {LARGEST_MEMBER} are read")
    if info.compress_type == ZSTANDARD:
        _need_zstandard(path)
    try:
        return decode_json(archive.read(name), f"{path}: {name}")
    except (zipfile.BadZipFile, NotImplementedError, OSError, RuntimeError) as error:
        raise ValueError(f"{path}: {name} cannot be read: {error}") from error


def _need_zstandard(path: Path) -> None:
    """Python reads such members itself from 3.14 on; before, a package teaches it."""
    if getattr(zipfile, "ZIP_ZSTANDARD", None) == ZSTANDARD:
        return
    try:
        import zipfile_zstd  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"{path}: is compressed with zstd, which this Python does not read: pip install 'kvgate[logs]'"
        ) from error


def _score(sample: Mapping[str, Any], metric: str | None, where: str) -> float:
    scores = _mapping(sample.get("scores"), f"{where}: scores")
    scorer, _, key = (metric or "").partition("/")
    if not scorer and len(scores) != 1:
        raise ValueError(f"{where}: has {len(scores)} scorers ({', '.join(scores)}); name one with --metric")
    scorer = scorer or next(iter(scores))
    if scorer not in scores:
        raise ValueError(f"{where}: no scorer {scorer!r:.80}; it has {', '.join(scores)}")
    value = _mapping(scores[scorer], f"{where}: {scorer}").get("value")
    if isinstance(value, dict):
        if key not in value:
            raise ValueError(f"{where}: {scorer} has several values ({', '.join(value)}); name one as {scorer}/KEY")
        value = value[key]
    return in_range(VALUES.get(value, value) if isinstance(value, str) else value, scorer, where)


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: is {type(value).__name__}; a mapping is needed")
    return value
