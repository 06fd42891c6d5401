"""The compiled CPU parts, decode (decode.c) and the softmax of prefill (soften.c): built once, never needed.

Without a C compiler, on another system than Linux, or with KVGATE_NATIVE=0, all goes through plain torch.
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

import torch
from torch import Tensor

from kvgate.kernels.types import Attention, PagedKV, Rules

SPLIT = 512  # as in decode.c
CHUNK = 16  # as in soften.c
_SOURCES = ("decode.c", "soften.c")
_FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-shared", "-fPIC")
_POINTERS = (
    "q q_sink k v positions tables live counts query_position lower exempt sink_end "
    "part part_max part_sum scores out lse mass"
)
_NUMBERS = (
    "q_row q_head sink_row sink_head k_page k_slot v_page v_slot positions_page tables_row tables_head live_row "
    "live_head counts_row counts_head rows heads group dim size width spans window bf16 threads"
)


class _Launch(ctypes.Structure):
    """`launch` of decode.c, field by field."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in _POINTERS.split()]
        + [(name, ctypes.c_int64) for name in _NUMBERS.split()]
        + [("scale", ctypes.c_float), ("softcap", ctypes.c_float)]
    )


def cache_folder() -> Path:
    """Where the built library is kept, for this user."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvgate"


def _processor() -> str:
    """What -march=native depends on: a cache folder may be shared by machines."""
    info = Path("/proc/cpuinfo")
    flags = [line for line in info.read_text().splitlines() if line.startswith(("flags", "Features", "model name"))]
    return platform.machine() + "".join(sorted(set(flags)))


class _Block(ctypes.Structure):
    """`block` of soften.c, field by field."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("logits", "lse", "mass", "partial")] + [
        (name, ctypes.c_int64) for name in ("heads", "kv_heads", "tokens", "n", "own", "window", "threads")
    ]


@functools.cache
def library() -> ctypes.CDLL | None:
    """The built library, or None where there cannot be one."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if os.environ.get("KVGATE_NATIVE") == "0" or platform.system() != "Linux" or compiler is None:
        return None
    sources = [Path(__file__).with_name(name) for name in _SOURCES]
    text = "".join(path.read_text() for path in [*sources, Path(__file__).with_name("exponential.h")])
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
        key = hashlib.sha256("\n".join([text, version, _processor(), *_FLAGS]).encode()).hexdigest()[:16]
        target = cache_folder() / f"kernels-{key}.so"
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                built = Path(folder) / "kernels.so"
                command = [compiler, *_FLAGS, *map(str, sources), "-o", str(built), "-lm"]
                subprocess.run(command, capture_output=True, check=True, timeout=120)
                built.replace(target)
        return ctypes.CDLL(str(target))
    except (OSError, subprocess.SubprocessError):
        return None


def serves(q: Tensor) -> bool:
    """Whether the compiled decode takes these queries [R, Q, D]."""
    plain = q.device.type == "cpu" and q.dtype in (torch.float32, torch.bfloat16) and q.shape[2] % 16 == 0
    return plain and library() is not None


def decode(q_RQD: Tensor, cache: PagedKV, query_position_R: Tensor, rules: Rules, want_mass: bool) -> Attention:
    """One query a row; only where `serves` says so."""
    rows, kv_heads, width = cache.tables_RHP.shape
    query_heads, dim = q_RQD.shape[1:]
    slots = width * cache.page_size
    splits = -(-slots // SPLIT)
    out = torch.empty((rows, query_heads, dim))
    lse = torch.empty((rows, query_heads))
    part = torch.empty((rows, query_heads, splits, dim))
    facts = torch.empty((2, rows, query_heads, splits))
    mass = torch.zeros((rows, kv_heads, width, cache.page_size)) if want_mass else None
    scores = torch.empty((rows, query_heads, slots)) if want_mass else None
    tables, live = (x if x.stride(2) == 1 else x.contiguous() for x in (cache.tables_RHP, cache.live_RHP))
    exempt = rules.exempt_RE2.contiguous() if rules.exempt_RE2 is not None and rules.lower is not None else None
    lower = None if rules.lower is None else rules.lower.contiguous()
    position = query_position_R.contiguous()
    ends = None if rules.sink_end_R is None else rules.sink_end_R.contiguous()
    q_sink, k, v = rules.q_sink, cache.k_pool_NSD, cache.v_pool_NSD
    counts, positions = cache.page_counts_RH, cache.positions_NS
    tensors = (q_RQD, q_sink, k, v, positions, tables, live, counts, position, lower, exempt, ends)
    results = (part, facts[0], facts[1], scores, out, lse, mass)
    second = q_RQD if q_sink is None else q_sink
    sizes = (rows, kv_heads, query_heads // max(1, kv_heads), dim, cache.page_size, width)
    spans = 0 if exempt is None else exempt.shape[1]
    flags = (rules.native_window or 0, q_RQD.dtype == torch.bfloat16, torch.get_num_threads())
    launch = _Launch(
        *(None if x is None else x.data_ptr() for x in (*tensors, *results)),
        *(stride for x in (q_RQD, second, k, v) for stride in x.stride()[:2]),
        positions.stride(0),
        *(stride for x in (tables, live, counts) for stride in x.stride()[:2]),
        *sizes,
        spans,
        *flags,
        rules.scale,
        rules.softcap or 0.0,
    )
    built = library()
    assert built is not None
    built.kvgate_decode(ctypes.byref(launch))
    return Attention(out.to(q_RQD.dtype), lse, mass)


def soften(
    logits_QTn: Tensor, kv_heads: int, own: int, window: int | None, want_mass: bool
) -> tuple[Tensor, Tensor | None]:
    """Causal softmax of contiguous fp32 logits, in place; query t's own slot is column own + t.

    Returns the log-sum-exp [Q, T] and, if wanted, the column mass [H, n]. Only where there is a `library`.
    """
    heads, tokens, n = logits_QTn.shape
    lse = torch.empty((heads, tokens))
    mass = torch.empty((kv_heads, n)) if want_mass else None
    partial = torch.empty((heads * -(-tokens // CHUNK), n)) if want_mass else None
    pointers = (None if x is None else x.data_ptr() for x in (logits_QTn, lse, mass, partial))
    numbers = (heads, kv_heads, tokens, n, own, window or 0, torch.get_num_threads())
    built = library()
    assert built is not None
    assert logits_QTn.is_contiguous()
    built.kvgate_soften(ctypes.byref(_Block(*pointers, *numbers)))
    return lse, mass
