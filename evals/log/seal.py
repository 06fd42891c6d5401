"""``seal.json``: one hash chain through a finished run's manifest, every line of its samples, its checks and its stop.

The chain begins with the bytes of ``run.json`` (which has the plan, the identity and the weights hash) and takes in
``samples.jsonl`` line by line, so no line can be changed, moved, added or left out without another head. The hash after
every :data:`BLOCK` lines is kept too, so that a change is found near where it is.

What it is worth: whoever edits a file by hand or by mistake is refused by every command that reads the run. There is no
secret in it, so who rewrites the seal as well is only found by ``kvgate verify``, which builds the items and scores the
answers again, and who makes up whole answers only by ``kvgate rerun``, which has the model answer again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from kvgate.evals.log.names import CHECKS, MANIFEST, SAMPLES, SEAL, STOP
from kvgate.evals.log.records import SCHEMA_VERSION, Count
from kvgate.typed import MIB, STRICT, parse_json, read_bytes

BLOCK = 256  # lines between two hashes that are kept
LARGEST_SAMPLES, LARGEST_FILE = 16 * 1024 * MIB, 64 * MIB
_DOMAIN = b"kvgate run, schema 2\n"

Hash = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True)
class Seal:
    """What a finished run's files hash to, BLAKE2b-256.

    Attributes:
        records: lines of ``samples.jsonl``. ``blocks``: the chain's hash after every :data:`BLOCK` lines and the last.
        head: after the last line, the checks and the stop: of the whole run.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = STRICT

    records: Count
    blocks: tuple[Hash, ...]
    head: Hash
    schema_version: int

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def chain(manifest: bytes, lines: Iterable[bytes], others: Iterable[bytes]) -> Seal:
    """The seal of a manifest, lines without their newlines, and the further files, in order."""
    head = _link(_DOMAIN, manifest)
    count, blocks = 0, list[str]()
    for count, line in enumerate(lines, 1):
        head = _link(head, line)
        if count % BLOCK == 0:
            blocks.append(head.hex())
    if count % BLOCK:
        blocks.append(head.hex())
    for other in others:
        head = _link(head, other)
    return Seal(count, tuple(blocks), head.hex(), SCHEMA_VERSION)


def _link(head: bytes, more: bytes) -> bytes:
    return hashlib.blake2b(head + hashlib.blake2b(more, digest_size=32).digest(), digest_size=32).digest()


def seal_of(folder: Path) -> Seal:
    """The seal that the files of a finished run have now. ValueError if one cannot be read or the last line is torn."""
    manifest = read_bytes(folder / MANIFEST, LARGEST_FILE)
    others = [read_bytes(folder / CHECKS, LARGEST_FILE)]
    if (folder / STOP).exists():
        others.append(read_bytes(folder / STOP, LARGEST_FILE))
    lines = read_bytes(folder / SAMPLES, LARGEST_SAMPLES).split(b"\n")
    if lines.pop() != b"":
        raise ValueError(f"{folder / SAMPLES}: the last line is incomplete; finish the run first")
    return chain(manifest, lines, others)


def require_sealed(folder: Path) -> Seal:
    """The run's seal. ValueError if there is none, or if a file is not as it was when the run was finished."""
    path = folder / SEAL
    if not path.is_file():
        raise ValueError(f"results folder {folder}: has no {SEAL}; finish the run with `kvgate run`")
    sealed, found = parse_json(Seal, read_bytes(path, LARGEST_FILE), str(path)), seal_of(folder)
    if sealed.schema_version != SCHEMA_VERSION:
        raise ValueError(f"{path}: schema_version {sealed.schema_version}, this kvgate reads {SCHEMA_VERSION}")
    if sealed == found:
        return sealed
    raise ValueError(
        f"results folder {folder}: not as it was when the run was finished: {_where(sealed, found)} (see {SEAL}); "
        "restore the files or run the plan again with another --out"
    )


def _where(sealed: Seal, found: Seal) -> str:
    if sealed.records != found.records:
        return f"{SAMPLES} has {found.records} lines, was sealed with {sealed.records}"
    pairs = zip(sealed.blocks, found.blocks, strict=False)
    block = next((place for place, (was, now) in enumerate(pairs) if was != now), None)
    if block is None:
        return f"{CHECKS} or {STOP} was changed"
    last = min((block + 1) * BLOCK, sealed.records)
    return f"{MANIFEST} or a line of {SAMPLES} from {block * BLOCK + 1} to {last} was changed"
