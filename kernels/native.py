"""The compiled CPU kernels (decode.c, extend.c): launch records from tensors. Never needed: see `native_build`."""

from __future__ import annotations

import ctypes
from ctypes import CDLL

import torch
from torch import Tensor

from kvgate.kernels.native_build import amx, library
from kvgate.kernels.types import Attention, PagedKV, Rules

__all__ = ["decode", "extend", "library", "prefill", "serves"]

SPLIT = 512  # as in attention.h
_POINTERS = (
    "q q_sink k v positions tables live counts query_position lower exempt sink_end row_start "
    "part part_max part_sum scores out lse mass scratch"
)
_NUMBERS = (
    "q_row q_head sink_row sink_head k_page k_slot v_page v_slot positions_page tables_row tables_head live_row "
    "live_head counts_row counts_head k_head v_head rows heads group dim size width contiguous spans window bf16 amx "
    "threads"
)


class _Launch(ctypes.Structure):
    """`launch` of attention.h, field by field; what is not set is zero."""

    _fields_ = (
        [(name, ctypes.c_void_p) for name in _POINTERS.split()]
        + [(name, ctypes.c_int64) for name in _NUMBERS.split()]
        + [("scale", ctypes.c_float), ("softcap", ctypes.c_float)]
    )


def serves(q: Tensor, multiple: int = 1) -> bool:
    """Whether the compiled kernels take these queries [T, Q, D]; `multiple`: what D must divide by (decode: 16)."""
    plain = q.device.type == "cpu" and q.dtype in (torch.float32, torch.bfloat16)
    return plain and q.shape[2] % multiple == 0 and library() is not None


def decode(q_RQD: Tensor, cache: PagedKV, query_position_R: Tensor, rules: Rules, want_mass: bool) -> Attention:
    """One query a row; head_dim a multiple of 16."""
    rows, kv_heads, width = cache.tables_RHP.shape
    query_heads, dim = q_RQD.shape[1:]
    slots = width * cache.page_size
    splits = -(-slots // SPLIT)
    out, lse = torch.empty((rows, query_heads, dim)), torch.empty((rows, query_heads))
    part = torch.empty((rows, query_heads, splits, dim))
    facts = torch.empty((2, rows, query_heads, splits))
    mass = torch.zeros((rows, kv_heads, width, cache.page_size)) if want_mass else None
    scores = torch.empty((rows, query_heads, slots)) if want_mass else None
    launch, kept = _paged(q_RQD, cache, query_position_R, rules)
    launch.part, launch.part_max, launch.part_sum = part.data_ptr(), facts[0].data_ptr(), facts[1].data_ptr()
    launch.out, launch.lse = out.data_ptr(), lse.data_ptr()
    if mass is not None and scores is not None:
        launch.mass, launch.scores = mass.data_ptr(), scores.data_ptr()
    _built().kvgate_decode(ctypes.byref(launch))
    del kept
    return Attention(out.to(q_RQD.dtype), lse, mass)


def extend(
    q_TQD: Tensor, cache: PagedKV, query_position_T: Tensor, row_start_R1: Tensor, rules: Rules, want_mass: bool
) -> Attention:
    """Several queries a row. A token's bits depend on what it sees and where that lies, on nothing else of the call."""
    rows, kv_heads, width = cache.tables_RHP.shape
    mass = torch.zeros((rows, kv_heads, width, cache.page_size)) if want_mass else None
    launch, kept = _paged(q_TQD, cache, query_position_T, rules)
    starts = row_start_R1.contiguous()
    launch.row_start = starts.data_ptr()
    result = _extend(launch, q_TQD, mass)
    del kept
    return result


def prefill(q_TQD: Tensor, k_THD: Tensor, v_THD: Tensor, rules: Rules, want_mass: bool) -> Attention:
    """Causal attention of one sequence over its own keys and values."""
    tokens, kv_heads, dim = k_THD.shape
    k, v = (x if x.stride(2) == 1 or dim == 1 else x.contiguous() for x in (k_THD, v_THD))
    mass = torch.zeros((kv_heads, tokens)) if want_mass else None
    launch = _Launch(q=q_TQD.data_ptr(), k=k.data_ptr(), v=v.data_ptr(), rows=1, contiguous=tokens)
    launch.k_slot, launch.k_head, launch.v_slot, launch.v_head = *k.stride()[:2], *v.stride()[:2]
    _queries(launch, q_TQD, kv_heads, rules)
    return _extend(launch, q_TQD, mass)


def _extend(launch: _Launch, q_TQD: Tensor, mass: Tensor | None) -> Attention:
    out = torch.empty(q_TQD.shape, dtype=q_TQD.dtype)
    lse = torch.empty(q_TQD.shape[:2])
    launch.out, launch.lse = out.data_ptr(), lse.data_ptr()
    if mass is not None:
        launch.mass = mass.data_ptr()
    launch.amx = amx() and q_TQD.dtype == torch.bfloat16
    built = _built()
    scratch = torch.empty(built.kvgate_extend_bytes(ctypes.byref(launch)), dtype=torch.uint8)
    launch.scratch = scratch.data_ptr()
    built.kvgate_extend(ctypes.byref(launch))
    return Attention(out, lse, mass)


def _queries(launch: _Launch, q: Tensor, kv_heads: int, rules: Rules) -> None:
    launch.q_row, launch.q_head = q.stride()[:2]
    launch.heads, launch.group, launch.dim = kv_heads, q.shape[1] // max(1, kv_heads), q.shape[2]
    launch.window, launch.bf16, launch.threads = rules.native_window or 0, q.dtype == torch.bfloat16, _threads()
    launch.scale, launch.softcap = rules.scale, rules.softcap or 0.0


def _paged(
    q: Tensor, cache: PagedKV, query_position: Tensor, rules: Rules
) -> tuple[_Launch, tuple[Tensor | None, ...]]:
    """The launch of a paged call, and the tensors that must outlive it."""
    tables, live = (x if x.stride(2) == 1 else x.contiguous() for x in (cache.tables_RHP, cache.live_RHP))
    exempt = rules.exempt_RE2.contiguous() if rules.exempt_RE2 is not None and rules.lower is not None else None
    lower = None if rules.lower is None else rules.lower.contiguous()
    position = query_position.contiguous()
    ends = None if rules.sink_end_R is None else rules.sink_end_R.contiguous()
    k, v, counts, positions = cache.k_pool_NSD, cache.v_pool_NSD, cache.page_counts_RH, cache.positions_NS
    kept = (q, rules.q_sink, k, v, positions, tables, live, counts, position, lower, exempt, ends)
    launch = _Launch(*(None if x is None else x.data_ptr() for x in kept))
    second = q if rules.q_sink is None else rules.q_sink
    launch.sink_row, launch.sink_head = second.stride()[:2]
    launch.k_page, launch.k_slot, launch.v_page, launch.v_slot = *k.stride()[:2], *v.stride()[:2]
    launch.positions_page = positions.stride(0)
    launch.tables_row, launch.tables_head = tables.stride()[:2]
    launch.live_row, launch.live_head = live.stride()[:2]
    launch.counts_row, launch.counts_head = counts.stride()
    launch.rows, _, launch.width = tables.shape
    launch.size, launch.spans = cache.page_size, 0 if exempt is None else exempt.shape[1]
    _queries(launch, q, tables.shape[1], rules)
    return launch, kept


def _threads() -> int:
    return torch.get_num_threads()


def _built() -> CDLL:
    built = library()
    assert built is not None
    return built
