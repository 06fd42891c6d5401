"""Builds the compiled CPU kernels, decode.c and extend.c, at first use; kept in the user's cache folder.

Without a C compiler, on another system than Linux, or with KVGATE_NATIVE=0, there is no library and all goes through
plain torch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

_SOURCES = ("decode.c", "extend.c")
_HEADERS = ("attention.h", "panel.h", "tiles.h")
_FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC")


def target_flags() -> tuple[str, ...]:
    """For this processor; whole vectors where it has AVX-512, which compilers use halved unless told."""
    wide = ("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ()
    return ("-march=native", *wide)


def cache_folder() -> Path:
    """Where built libraries are kept, for this user."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvgate"


@functools.cache
def library() -> ctypes.CDLL | None:
    """The library for this processor, or None where there cannot be one."""
    if os.environ.get("KVGATE_NATIVE") == "0" or platform.system() != "Linux":
        return None
    try:
        return build(target_flags())
    except (OSError, subprocess.SubprocessError):
        return None


@functools.cache
def amx() -> bool:
    """Whether bf16 products may use AMX: built in, allowed by Linux, and not refused by KVGATE_AMX=0."""
    built = library()
    return os.environ.get("KVGATE_AMX") != "0" and built is not None and bool(built.kvgate_amx())


def build(target: tuple[str, ...]) -> ctypes.CDLL:
    """Compile with these target flags, unless the cache has it. OSError or SubprocessError where that fails."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        raise FileNotFoundError("no C compiler: install gcc or clang")
    folder, flags = Path(__file__).parent, (*_FLAGS, *target)
    text = "".join((folder / name).read_text() for name in (*_SOURCES, *_HEADERS))
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    key = hashlib.sha256("\n".join([text, version, _processor(), *flags]).encode()).hexdigest()[:16]
    kept = cache_folder() / f"kernels-{key}.so"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
            built = Path(scratch) / "kernels.so"
            sources = [str(folder / name) for name in _SOURCES]
            subprocess.run(
                [compiler, *flags, *sources, "-o", str(built), "-lm"], capture_output=True, check=True, timeout=400
            )
            built.replace(kept)
    return _declared(ctypes.CDLL(str(kept)))


def _declared(built: ctypes.CDLL) -> ctypes.CDLL:
    for name, result in (("decode", None), ("extend", None), ("extend_bytes", ctypes.c_int64)):
        function = getattr(built, f"kvgate_{name}")
        function.argtypes, function.restype = [ctypes.c_void_p], result
    return built


def _processor() -> str:
    """What -march=native depends on: a cache folder may be shared by machines."""
    info = Path("/proc/cpuinfo")
    flags = [line for line in info.read_text().splitlines() if line.startswith(("flags", "Features", "model name"))]
    return platform.machine() + "".join(sorted(set(flags)))
