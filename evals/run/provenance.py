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
# What reads a finished run: editing it changes no answer, no score and no record.
_READING = (
    "evals/judge",
    "evals/leaderboard",
    "evals/report",
    "evals/stats",
    "evals/run/rerun.py",
    "evals/run/verify.py",
    "evals/lm_eval/verify.py",
    "lifecycle/lab",
)
_SIMD = ("sse4", "avx", "amx", "fma", "f16c", "asimd", "sve", "bf16", "i8mm")
_SIMD_SETTINGS = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
)


def provenance(info: ModelInfo) -> dict[str, Any]:
    """Everything a reader needs to trust or repeat a run, but for the plan and the seeds."""
    return {
        "kvgate": kvgate.__version__,
        "code_hash": code_hash(),
        "reading_code_hash": code_hash(reading=True),
        "git": git_revision(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "model": {**asdict(info), "native_windows": list(info.native_windows), "stop_ids": list(info.stop_ids)},
        "machine": machine(),
    }


@cache  # what runs is what was imported, whatever is edited meanwhile
def code_hash(*, reading: bool = False) -> str:
    """BLAKE2b-128 over the package's Python and C files that change outcomes: engine, kernels, compressors, lifecycle
    manager, plan, items, suites, scoring, run and log. With ``reading``: over the rest, which judges and reports.

    Tells two states of the code apart where git cannot, and an edit of a report from one of a kernel. The command line
    and the docs count as neither.
    """
    root = Path(kvgate.__file__).parent
    total = hashlib.blake2b(digest_size=16)
    files = [file for room in _ROOMS for file in sorted((root / room).rglob("*")) if file.suffix in (".py", ".c", ".h")]
    for file in [*sorted(root.glob("*.py")), *files]:
        name = file.relative_to(root).as_posix()
        if any(name == part or name.startswith(f"{part}/") for part in _READING) == reading:
            total.update(f"{name}\n".encode())
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
    """Processor, its instruction sets, the path its matrix products take, cores, and the GPU if one is used.

    Sums round differently with another instruction set: the same plan on a processor without AMX gave other answers in
    a tenth of the cells in bfloat16.
    """
    import torch

    from kvgate.kernels import native

    found: dict[str, Any] = {"system": platform.system(), "processor": platform.machine(), "cores": os.cpu_count()}
    found["threads"] = torch.get_num_threads()
    found["compiled_decode"] = native.library() is not None
    found["instruction_sets"] = instruction_sets()
    found["matrix_products"] = matrix_products()
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(0)
    return found


def instruction_sets() -> list[str]:
    """The processor's vector and matrix extensions, as Linux names them; none where it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return sorted({flag for flag in flags if flag.startswith(_SIMD)})


def matrix_products() -> dict[str, str]:
    """What multiplies matrices on the CPU: BLAS, oneDNN, torch's own level, and settings that choose among paths."""
    import torch

    lines = [line.strip(" -,") for line in torch.__config__.show().splitlines()]
    blas = next((part.partition("=")[2] for line in lines for part in line.split(", ") if "BLAS_INFO=" in part), "none")
    onednn = next((line for line in lines if "MKL-DNN" in line or "oneDNN" in line), "none")
    found = {"blas": blas, "onednn": onednn, "torch_capability": torch.backends.cpu.get_cpu_capability()}
    return found | {name: os.environ[name] for name in _SIMD_SETTINGS if name in os.environ}


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
