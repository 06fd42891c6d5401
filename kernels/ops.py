"""The public operations: one function each, checked arguments, Triton on CUDA and torch on the CPU.

Shapes are in the legend of `kvgate.kernels.types`. Every function takes `backend`: "torch", "triton", "native" or None
(the environment's KVGATE_BACKEND if set, else triton on CUDA and native elsewhere). native is torch, with
decode, extend and prefill with mass in fp32 and bf16 compiled wherever there is a C compiler. Bad arguments raise
ValueError and change nothing. Floating point tensors are float32, float16 or bfloat16, K, V and queries alike; fp8 and
learned sink logits are refused by name.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Protocol, cast, get_args

import torch
from torch import Tensor

from kvgate.kernels import checks, native, torch_ops, torch_pages, torch_prefill
from kvgate.kernels.types import Attention, Backend, PagedKV, Pools, Rules


class _AttentionBackend(Protocol):
    def decode(
        self, q_RQD: Tensor, cache: PagedKV, query_position_R: Tensor, rules: Rules, want_mass: bool
    ) -> Attention: ...
    def extend(
        self,
        q_TQD: Tensor,
        cache: PagedKV,
        query_position_T: Tensor,
        row_start: list[int],
        rules: Rules,
        want_mass: bool,
    ) -> Attention: ...
    def prefill(self, q_TQD: Tensor, k_THD: Tensor, v_THD: Tensor, rules: Rules, want_mass: bool) -> Attention: ...


class _PagesBackend(Protocol):
    def append(self, k_THD: Tensor, v_THD: Tensor, position_T: Tensor, slots_TH: Tensor, pools: Pools) -> None: ...
    def copy_slots(self, src_M: Tensor, dst_M: Tensor, pools: Pools) -> None: ...
    def copy_pages(self, src: Tensor, dst: Tensor, pools: Pools) -> None: ...
    def gather(self, ids: Tensor, pools: Pools) -> Pools: ...
    def scatter(self, ids: Tensor, pages: Pools, pools: Pools) -> None: ...


def choose_backend(backend: Backend | None, device: torch.device) -> Backend:
    """`backend` if given, else KVGATE_BACKEND, else triton on CUDA and native elsewhere. ValueError for other names."""
    name = backend or os.environ.get("KVGATE_BACKEND") or ("triton" if device.type == "cuda" else "native")
    checks.require(name in get_args(Backend), f"backend {name!r} is unknown: {', '.join(get_args(Backend))}")
    return cast(Backend, name)


def interpreted() -> bool:
    """Whether Triton is there and runs kernels in its interpreter (TRITON_INTERPRET=1 before Python started)."""
    if importlib.util.find_spec("triton") is None:
        return False
    return bool(importlib.import_module("triton.knobs").runtime.interpret)


def decode_attention(
    q_RQD: Tensor,
    k_pool_NSD: Tensor,
    v_pool_NSD: Tensor,
    tables_RHP: Tensor,
    live_RHP: Tensor,
    page_counts_RH: Tensor,
    positions_NS: Tensor,
    query_position_R: Tensor,
    *,
    scale: float,
    lower_R: Tensor | None = None,
    exempt_RE2: Tensor | None = None,
    sink_end_R: Tensor | None = None,
    q_sink_RQD: Tensor | None = None,
    native_window: int | None = None,
    softcap: float | None = None,
    sink_logits_Q: Tensor | None = None,
    want_mass: bool = False,
    backend: Backend | None = None,
) -> Attention:
    """One new token a row, its K and V already in the pages; query_position_R int32."""
    _refuse_sink_logits(sink_logits_Q)
    cache = PagedKV(k_pool_NSD, v_pool_NSD, positions_NS, tables_RHP, live_RHP, page_counts_RH)
    rules = Rules(scale, lower_R, exempt_RE2, sink_end_R, q_sink_RQD, native_window, softcap)
    _check(q_RQD, "q_RQD", cache, query_position_R, rules)
    rows = tables_RHP.shape[0]
    checks.require(q_RQD.shape[0] == rows, f"q_RQD: {q_RQD.shape[0]} rows, the tables have {rows}")
    if choose_backend(backend, q_RQD.device) == "native" and native.serves(q_RQD, 16):
        return native.decode(q_RQD, cache, query_position_R, rules, want_mass)
    return _attention(backend, q_RQD).decode(q_RQD, cache, query_position_R, rules, want_mass)


def extend_attention(
    q_TQD: Tensor,
    k_pool_NSD: Tensor,
    v_pool_NSD: Tensor,
    tables_RHP: Tensor,
    live_RHP: Tensor,
    page_counts_RH: Tensor,
    positions_NS: Tensor,
    query_position_T: Tensor,
    row_start_R1: Tensor,
    *,
    scale: float,
    lower_T: Tensor | None = None,
    exempt_RE2: Tensor | None = None,
    sink_end_R: Tensor | None = None,
    q_sink_TQD: Tensor | None = None,
    native_window: int | None = None,
    softcap: float | None = None,
    sink_logits_Q: Tensor | None = None,
    want_mass: bool = False,
    backend: Backend | None = None,
) -> Attention:
    """Several new tokens a row, their K and V already in the pages; causality goes by positions.

    Row r owns queries row_start_R1[r]:row_start_R1[r + 1] (int32, host or device; reading it from a GPU waits for it).
    """
    _refuse_sink_logits(sink_logits_Q)
    cache = PagedKV(k_pool_NSD, v_pool_NSD, positions_NS, tables_RHP, live_RHP, page_counts_RH)
    rules = Rules(scale, lower_T, exempt_RE2, sink_end_R, q_sink_TQD, native_window, softcap)
    _check(q_TQD, "q_TQD", cache, query_position_T, rules)
    checks.require(row_start_R1.dtype == torch.int32, f"row_start_R1: dtype {row_start_R1.dtype}, expected torch.int32")
    row_start: list[int] = row_start_R1.tolist()
    checks.row_starts(row_start, tables_RHP.shape[0], q_TQD.shape[0])
    if choose_backend(backend, q_TQD.device) == "native" and native.serves(q_TQD):
        return native.extend(q_TQD, cache, query_position_T, row_start_R1.cpu(), rules, want_mass)
    return _attention(backend, q_TQD).extend(q_TQD, cache, query_position_T, row_start, rules, want_mass)


def prefill_attention(
    q_TQD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    *,
    scale: float,
    native_window: int | None = None,
    softcap: float | None = None,
    sink_logits_Q: Tensor | None = None,
    want_mass: bool = False,
    backend: Backend | None = None,
) -> Attention:
    """One sequence on an empty cache: token t attends tokens 0..t of the same tensors. mass is [H, T]."""
    _refuse_sink_logits(sink_logits_Q)
    checks.require(k_THD.dim() == 3, f"k_THD: {k_THD.dim()} dims, expected [T, H, D]")
    tokens, kv_heads, dim = k_THD.shape
    checks.require(k_THD.dtype in checks.DTYPES, f"k_THD: dtype {k_THD.dtype}, expected float32, float16 or bfloat16")
    checks.tensor("v_THD", v_THD, (tokens, kv_heads, dim), k_THD.dtype, k_THD.device)
    checks.queries("q_TQD", q_TQD, kv_heads, dim, k_THD.dtype, k_THD.device)
    checks.require(q_TQD.shape[0] == tokens, f"q_TQD: {q_TQD.shape[0]} tokens, k_THD has {tokens}")
    rules = Rules(scale, native_window=native_window, softcap=softcap)
    checks.logits(rules)
    compiled = choose_backend(backend, q_TQD.device) == "native" and native.serves(q_TQD)
    if compiled and not torch_prefill.is_flash(q_TQD, rules, want_mass):
        return native.prefill(q_TQD, k_THD, v_THD, rules, want_mass)
    return _attention(backend, q_TQD).prefill(q_TQD, k_THD, v_THD, rules, want_mass)


def append_kv(
    k_THD: Tensor,
    v_THD: Tensor,
    position_T: Tensor,
    slots_TH: Tensor,
    k_pool_NSD: Tensor,
    v_pool_NSD: Tensor,
    positions_NS: Tensor,
    *,
    backend: Backend | None = None,
) -> None:
    """Write new tokens of all rows: token t of kv head h goes to flat slot slots_TH[t, h] = page * S + slot (int64).

    Fresh slots and reused ones alike; no slot twice in a call. position_T is int32.
    """
    checks.pools(k_pool_NSD, v_pool_NSD, positions_NS)
    tokens, kv_heads = slots_TH.shape if slots_TH.dim() == 2 else (0, 0)
    dtype, device, dim = k_pool_NSD.dtype, k_pool_NSD.device, k_pool_NSD.shape[2]
    checks.slots("slots_TH", slots_TH, (tokens, kv_heads), positions_NS)
    checks.tensor("k_THD", k_THD, (tokens, kv_heads, dim), dtype, device)
    checks.tensor("v_THD", v_THD, (tokens, kv_heads, dim), dtype, device)
    checks.tensor("position_T", position_T, (tokens,), torch.int32, device)
    _pages(backend, positions_NS).append(k_THD, v_THD, position_T, slots_TH, (k_pool_NSD, v_pool_NSD, positions_NS))


def copy_slots(
    src_M: Tensor,
    dst_M: Tensor,
    k_pool_NSD: Tensor,
    v_pool_NSD: Tensor,
    positions_NS: Tensor,
    *,
    backend: Backend | None = None,
) -> None:
    """Copy K, V and position from flat slot to flat slot (int64), out of place: no target is a source or repeated."""
    checks.pools(k_pool_NSD, v_pool_NSD, positions_NS)
    checks.slots("src_M", src_M, (src_M.numel(),), positions_NS)
    checks.slots("dst_M", dst_M, (dst_M.numel(),), positions_NS)
    checks.distinct(src_M, dst_M, positions_NS.numel())
    _pages(backend, positions_NS).copy_slots(src_M, dst_M, (k_pool_NSD, v_pool_NSD, positions_NS))


def copy_pages(
    src_ids: Tensor,
    dst_ids: Tensor,
    k_pool_NSD: Tensor,
    v_pool_NSD: Tensor,
    positions_NS: Tensor,
    *,
    backend: Backend | None = None,
) -> None:
    """Copy whole pages (copy-on-write); ids int32 or int64 [M], out of place as in `copy_slots`."""
    checks.pools(k_pool_NSD, v_pool_NSD, positions_NS)
    pages, device = k_pool_NSD.shape[0], k_pool_NSD.device
    checks.page_ids("src_ids", src_ids, pages, device)
    checks.page_ids("dst_ids", dst_ids, pages, device)
    checks.distinct(src_ids, dst_ids, pages)
    _pages(backend, positions_NS).copy_pages(src_ids, dst_ids, (k_pool_NSD, v_pool_NSD, positions_NS))


def gather_pages(
    ids: Tensor, k_pool_NSD: Tensor, v_pool_NSD: Tensor, positions_NS: Tensor, *, backend: Backend | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Pages on their way out (swap): K [M, S, D], V [M, S, D] and positions [M, S] on the host, pinned for a CUDA pool.

    From CUDA the copy is queued on the current stream: synchronise it before reading the result or freeing the pages.
    """
    checks.pools(k_pool_NSD, v_pool_NSD, positions_NS)
    checks.page_ids("ids", ids, k_pool_NSD.shape[0], k_pool_NSD.device)
    k, v, positions = _pages(backend, positions_NS).gather(ids, (k_pool_NSD, v_pool_NSD, positions_NS))
    return _to_host(k), _to_host(v), _to_host(positions)


def scatter_pages(
    ids: Tensor,
    k_MSD: Tensor,
    v_MSD: Tensor,
    positions_MS: Tensor,
    k_pool_NSD: Tensor,
    v_pool_NSD: Tensor,
    positions_NS: Tensor,
    *,
    backend: Backend | None = None,
) -> None:
    """Pages on their way in: what `gather_pages` gave, written to pages `ids` (no id twice)."""
    checks.pools(k_pool_NSD, v_pool_NSD, positions_NS)
    pages, size, dim = k_pool_NSD.shape
    count = ids.numel()
    checks.page_ids("ids", ids, pages, k_pool_NSD.device)
    checks.tensor("k_MSD", k_MSD, (count, size, dim), k_pool_NSD.dtype, k_MSD.device)
    checks.tensor("v_MSD", v_MSD, (count, size, dim), k_pool_NSD.dtype, k_MSD.device)
    checks.tensor("positions_MS", positions_MS, (count, size), torch.int32, k_MSD.device)
    _pages(backend, positions_NS).scatter(ids, (k_MSD, v_MSD, positions_MS), (k_pool_NSD, v_pool_NSD, positions_NS))


def _attention(backend: Backend | None, like: Tensor) -> _AttentionBackend:
    """The module that answers; Triton is imported only where it is used."""
    if choose_backend(backend, like.device) != "triton":
        return cast(_AttentionBackend, torch_ops)
    _require_triton(like)
    return cast(_AttentionBackend, importlib.import_module("kvgate.kernels.triton_ops"))


def _pages(backend: Backend | None, like: Tensor) -> _PagesBackend:
    if choose_backend(backend, like.device) != "triton":
        return cast(_PagesBackend, torch_pages)
    _require_triton(like)
    return cast(_PagesBackend, importlib.import_module("kvgate.kernels.triton_pages"))


def _require_triton(like: Tensor) -> None:
    found = importlib.util.find_spec("triton") is not None
    checks.require(found, "backend triton: triton is not installed: install it or use backend torch")
    if like.device.type != "cuda":
        checks.require(interpreted(), "backend triton: CPU tensors need TRITON_INTERPRET=1 before Python starts")


def _to_host(value: Tensor) -> Tensor:
    if value.device.type == "cpu":
        return value
    host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    host.copy_(value, non_blocking=True)
    return host


def _refuse_sink_logits(value: Tensor | None) -> None:
    checks.require(value is None, "sink_logits_Q: learned sink logits (gpt-oss) are not supported: use another model")


def _check(q: Tensor, name: str, cache: PagedKV, query_position: Tensor, rules: Rules) -> None:
    checks.cache(cache)
    rows, kv_heads, _ = cache.tables_RHP.shape
    checks.queries(name, q, kv_heads, cache.head_dim, cache.k_pool_NSD.dtype, cache.k_pool_NSD.device)
    checks.tensor("query_position", query_position, (q.shape[0],), torch.int32, q.device)
    checks.rules(rules, q, rows)
