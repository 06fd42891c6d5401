"""Where a result comes from: code, versions, model, machine."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import kvgate
from kvgate.engine.models import ModelInfo

_PACKAGES = ("torch", "transformers", "triton", "numpy", "scipy")
_ROOMS = ("compressors", "engine", "evals", "kernels", "lifecycle")


def provenance(info: ModelInfo) -> dict[str, Any]:
    """Everything a reader needs to trust or repeat a run, but for the plan and the seeds."""
    return {
        "kvgate": kvgate.__version__,
        "code_hash": code_hash(),
        "git": git_revision(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "model": {**asdict(info), "native_windows": list(info.native_windows), "stop_ids": list(info.stop_ids)},
        "machine": machine(),
    }


@cache  # what runs is what was imported, whatever is edited meanwhile
def code_hash() -> str:
    """BLAKE2b-128 over the package's Python and C files: tells two states of the code apart where git cannot."""
    root = Path(kvgate.__file__).parent
    total = hashlib.blake2b(digest_size=16)
    files = [file for room in _ROOMS for file in sorted((root / room).rglob("*")) if file.suffix in (".py", ".c", ".h")]
    for file in [*sorted(root.glob("*.py")), *files]:
        total.update(f"{file.relative_to(root).as_posix()}\n".encode())
        total.update(file.read_bytes())
    return total.hexdigest()


@cache
def git_revision() -> dict[str, Any]:
    """Commit and whether the tree differs from it; "none" outside a checkout of kvgate."""
    folder = Path(kvgate.__file__).resolve().parents[2]
    if not (folder / ".git").exists():
        return {"revision": "none", "dirty": False}
    revision = _git(folder, "rev-parse", "HEAD")
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!results")
    return {"revision": revision or "none", "dirty": bool(changed)}


def machine() -> dict[str, Any]:
    """Processor and cores, the GPU if one is used."""
    import torch

    from kvgate.kernels import native

    found: dict[str, Any] = {"system": platform.system(), "processor": platform.machine(), "cores": os.cpu_count()}
    found["threads"] = torch.get_num_threads()
    found["compiled_decode"] = native.library() is not None
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(0)
    return found


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
