"""Host-side checks of arguments: shapes, dtypes, strides and devices, each with one clear line.

Contents of tables are not read (that would wait for the GPU); the pool that made them answers for them.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from kvgate.kernels.types import MAX_PAGE_SIZE, PagedKV, Rules

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def require(condition: bool, message: str) -> None:
    """ValueError with `message` unless the condition holds."""
    if not condition:
        raise ValueError(message)


def tensor(name: str, value: Tensor, shape: tuple[int | None, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Shape (None matches any size), dtype and device of an argument. Quick where all is right, for decode."""
    found = value.shape
    if value.dtype == dtype and value.device == device and len(found) == len(shape):
        for want, have in zip(shape, found, strict=True):
            if want is not None and want != have:
                break
        else:
            return
    expected = "[" + ", ".join("any" if size is None else str(size) for size in shape) + "]"
    fits = len(found) == len(shape) and all(w is None or w == h for w, h in zip(shape, found, strict=True))
    require(fits, f"{name}: shape {list(found)}, expected {expected}")
    require(value.dtype == dtype, f"{name}: dtype {value.dtype}, expected {dtype}")
    require(value.device == device, f"{name}: on {value.device}, the pools are on {device}")


def pools(k_pool_NSD: Tensor, v_pool_NSD: Tensor, positions_NS: Tensor) -> None:
    """The three tensors of a page pool."""
    require(k_pool_NSD.dim() == 3, f"k_pool_NSD: {k_pool_NSD.dim()} dims, expected [N, S, D]")
    kind = k_pool_NSD.dtype
    fp8 = str(kind).startswith("torch.float8")
    require(not fp8, f"k_pool_NSD: {kind} is not supported: keep K and V in fp32, fp16 or bf16")
    require(kind in DTYPES, f"k_pool_NSD: dtype {kind}, expected float32, float16 or bfloat16")
    pages, size, dim = k_pool_NSD.shape
    require(
        1 <= size <= MAX_PAGE_SIZE, f"page_size {size} is not supported: 1 to {MAX_PAGE_SIZE} (one live word a page)"
    )
    require(dim >= 1, "k_pool_NSD: head_dim is 0")
    tensor("v_pool_NSD", v_pool_NSD, (pages, size, dim), kind, k_pool_NSD.device)
    tensor("positions_NS", positions_NS, (pages, size), torch.int32, k_pool_NSD.device)
    for name, value in (("k_pool_NSD", k_pool_NSD), ("v_pool_NSD", v_pool_NSD), ("positions_NS", positions_NS)):
        require(
            value.stride(-1) == 1 or value.shape[-1] == 1,
            f"{name}: last dim must be contiguous, stride {value.stride(-1)}",
        )


def cache(value: PagedKV) -> None:
    """Pools, tables, live words and page counts of a launch."""
    pools(value.k_pool_NSD, value.v_pool_NSD, value.positions_NS)
    device = value.k_pool_NSD.device
    require(value.tables_RHP.dim() == 3, f"tables_RHP: {value.tables_RHP.dim()} dims, expected [R, H, P]")
    rows, kv_heads, width = value.tables_RHP.shape
    tensor("tables_RHP", value.tables_RHP, (rows, kv_heads, width), torch.int32, device)
    tensor("live_RHP", value.live_RHP, (rows, kv_heads, width), torch.int32, device)
    tensor("page_counts_RH", value.page_counts_RH, (rows, kv_heads), torch.int32, device)


def queries(name: str, q: Tensor, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Queries [tokens, Q, D] whose heads divide among the kv heads."""
    tensor(name, q, (None, None, dim), dtype, device)
    heads = q.shape[1]
    divides = kv_heads > 0 and heads % kv_heads == 0
    require(divides, f"{name}: {heads} query heads do not divide among {kv_heads} kv heads")
    require(q.stride(-1) == 1 or dim == 1, f"{name}: last dim must be contiguous, stride {q.stride(-1)}")


def rules(value: Rules, q: Tensor, rows: int) -> None:
    """Scale, windows, spans and sinks against queries [tokens, Q, D] of `rows` rows."""
    tokens, device = q.shape[0], q.device
    logits(value)
    if value.lower is not None:
        tensor("lower", value.lower, (tokens,), torch.int32, device)
    if value.exempt_RE2 is not None:
        tensor("exempt_RE2", value.exempt_RE2, (rows, None, 2), torch.int32, device)
    together = (value.sink_end_R is None) == (value.q_sink is None)
    require(together, "sink_end_R and q_sink: give both or neither")
    if value.sink_end_R is not None and value.q_sink is not None:
        tensor("sink_end_R", value.sink_end_R, (rows,), torch.int32, device)
        tensor("q_sink", value.q_sink, tuple(q.shape), q.dtype, device)
        require(value.q_sink.stride(-1) == 1 or q.shape[-1] == 1, "q_sink: last dim must be contiguous")


def logits(value: Rules) -> None:
    """The scalars."""
    require(value.scale > 0, f"scale {value.scale}: must be positive")
    window = value.native_window
    require(window is None or window >= 1, f"native_window {window}: must be at least 1, or None for no window")
    require(
        value.softcap is None or value.softcap > 0, f"softcap {value.softcap}: must be positive, or None for no cap"
    )


def row_starts(row_start: list[int], rows: int, tokens: int) -> None:
    """Offsets of the rows' queries: rows + 1 of them, from 0 to tokens, never falling."""
    require(len(row_start) == rows + 1, f"row_start_R1: {len(row_start)} entries, expected rows + 1 = {rows + 1}")
    ends = row_start[0] == 0 and row_start[-1] == tokens
    require(ends, f"row_start_R1: runs from {row_start[0]} to {row_start[-1]}, expected 0 to {tokens} tokens")
    rising = all(a <= b for a, b in itertools.pairwise(row_start))
    require(rising, "row_start_R1: must not decrease")


def slots(name: str, value: Tensor, shape: tuple[int, ...], positions_NS: Tensor) -> None:
    """int64 flat slots; their range is checked where reading it costs nothing (on the CPU)."""
    tensor(name, value, shape, torch.int64, positions_NS.device)
    in_range(name, value, positions_NS.numel())


def page_ids(name: str, value: Tensor, pages: int, device: torch.device) -> None:
    """Page ids [M], int32 or int64."""
    integer = value.dtype in (torch.int32, torch.int64)
    require(integer, f"{name}: dtype {value.dtype}, expected int32 or int64")
    tensor(name, value, (None,), value.dtype, device)
    in_range(name, value, pages)


def in_range(name: str, value: Tensor, limit: int) -> None:
    """0 <= value < limit, for CPU tensors."""
    if value.device.type == "cpu" and value.numel():
        low, high = (int(x) for x in value.aminmax())
        require(low >= 0 and high < limit, f"{name}: {low if low < 0 else high} is outside 0..{limit - 1}")


def distinct(src: Tensor, dst: Tensor, limit: int) -> None:
    """Copies are out of place: no target twice, no target that is also a source (checked on the CPU)."""
    require(src.shape == dst.shape, f"source and target counts differ: {src.numel()} and {dst.numel()}")
    if dst.device.type == "cpu" and dst.numel():
        named = torch.zeros(limit, dtype=torch.bool)
        named[dst] = True
        require(int(named.sum()) == dst.numel(), "a target is named twice in one copy")
        require(not bool(named[src].any()), "a target is also a source: copies are out of place")
