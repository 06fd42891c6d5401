"""Which models passed the self-check, kept in the user's cache folder. Lost or unwritable entries only cost time."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvgate
from kvgate.engine.embedded import cache_root

_ROOMS = ("compressors", "engine", "kernels", "lifecycle")


def cache_key(weights_hash: str, config: str, device: str, numerics: str) -> str:
    """BLAKE2b-128 of all that could change the outcome: weights, configuration, code, libraries, processor."""
    import torch

    from kvgate.kernels import native

    processor = torch.cuda.get_device_name(0) if device == "cuda" else torch.backends.cpu.get_cpu_capability()
    parts = [
        weights_hash, config, device, numerics, processor, platform.machine(), platform.python_version(), engine_hash(),
        *(version(name) for name in ("torch", "transformers", "numpy")),
        os.environ.get("KVGATE_BACKEND", ""), str(native.library() is not None),
    ]  # fmt: skip
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


@cache  # what runs is what was imported, whatever is edited meanwhile
def engine_hash() -> str:
    """BLAKE2b-128 over the Python and C files of the engine and of the rooms below it."""
    root = Path(kvgate.__file__).parent
    total = hashlib.blake2b(digest_size=16)
    for room in _ROOMS:
        for file in sorted((root / room).rglob("*")):
            if file.suffix in (".py", ".c", ".h"):
                total.update(f"{file.relative_to(root).as_posix()}\n".encode() + file.read_bytes())
    return total.hexdigest()


def recall(key: str) -> dict[str, Any] | None:
    """What was found for ``key``, None if nothing readable is there."""
    with suppress(OSError, ValueError):
        found = json.loads(_file(key).read_text())
        if isinstance(found, dict) and found.get("key") == key:
            return found
    return None


def remember(key: str, found: dict[str, Any]) -> None:
    """Keep ``found``; concurrent writers each rename a whole file, and a folder that cannot be written is no fault."""
    target = _file(key)
    with suppress(OSError):
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(dir=target.parent, prefix=".writing-")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump({"key": key, **found}, file)
            Path(scratch).replace(target)
        except OSError:
            Path(scratch).unlink(missing_ok=True)
            raise


def _file(key: str) -> Path:
    return cache_root() / "self-checks" / f"{key}.json"
