"""Speed of the operations at realistic shapes, each beside a reference measured in the same run."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvgate.kernels import ops
from kvgate.kernels.types import Backend, PagedKV, Pools

PAGE = 16


@dataclass(frozen=True, slots=True)
class Model:
    """Attention shape of a model."""

    name: str
    kv_heads: int
    group: int
    head_dim: int


MODELS = (
    Model("Llama-3-8B", 8, 4, 128),
    Model("Qwen2.5-7B", 4, 7, 128),
    Model("SmolLM2-135M", 3, 3, 64),
)


@dataclass(frozen=True, slots=True)
class Speed:
    """One measurement. ms: median wall time; gb_per_s: bytes that had to move (live K and V) per second, in 1e9.

    of_copy: gb_per_s over that of a device copy (read and written bytes) in the same run; reference_ms: torch SDPA on
    contiguous tensors of the same live size, where there is such a thing; flashinfer_ms: FlashInfer's paged decode of
    the same live size, where it is installed and serves the shape.
    """

    operation: str
    model: str
    dtype: str
    rows: int
    context: int
    keep: float
    layout: str
    ms: float
    gb_per_s: float
    of_copy: float
    reference_ms: float | None = None
    flashinfer_ms: float | None = None


def median_ms(call: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Median milliseconds of a call after two warm-ups: events on CUDA, wall clock on the CPU."""
    for _ in range(2):
        call()
    times: list[float] = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        else:
            began = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - began))
    return sorted(times)[len(times) // 2]


def copy_bandwidth(device: torch.device, size: int) -> float:
    """GB/s of a copy of `size` bytes on the device, read and written bytes counted."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / median_ms(lambda: target.copy_(source), device) / 1e6


def paged(
    model: Model, rows: int, context: int, keep: float, layout: str, dtype: torch.dtype, device: torch.device
) -> PagedKV:
    """A cache in random page order. dense: only the kept share of pages; scattered: all pages, a share of slots."""
    heads, pages = model.kv_heads, context // PAGE
    used = max(1, round(pages * keep)) if layout == "dense" else pages
    total = rows * heads * used
    both = torch.randn((total, 2, PAGE, model.head_dim), dtype=dtype, device=device)
    tables = torch.randperm(total, device=device).int().view(rows, heads, used)
    positions = torch.empty((total, PAGE), dtype=torch.int32, device=device)
    positions[tables.long()] = torch.arange(used * PAGE, dtype=torch.int32, device=device).view(used, PAGE)
    bits = torch.rand((rows, heads, used, PAGE), device=device) < (1.0 if layout == "dense" else keep)
    live = (bits.int() << torch.arange(PAGE, dtype=torch.int32, device=device)).sum(-1).int()
    counts = torch.full((rows, heads), used, dtype=torch.int32, device=device)
    return PagedKV(both[:, 0], both[:, 1], positions, tables, live, counts)


def decode_call(model: Model, cache: PagedKV, backend: Backend, want_mass: bool = False) -> Callable[[], object]:
    """A decode step over all of a cache."""
    rows = cache.tables_RHP.shape[0]
    pool, device = cache.k_pool_NSD, cache.k_pool_NSD.device
    q = torch.randn((rows, model.kv_heads * model.group, model.head_dim), dtype=pool.dtype, device=device)
    at = torch.full((rows,), 1 << 29, dtype=torch.int32, device=device)
    tables = (cache.tables_RHP, cache.live_RHP, cache.page_counts_RH, cache.positions_NS)
    scale = model.head_dim**-0.5
    return lambda: ops.decode_attention(
        q, pool, cache.v_pool_NSD, *tables, at, scale=scale, want_mass=want_mass, backend=backend
    )


def sdpa_decode(model: Model, rows: int, tokens: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """SDPA on contiguous K and V, the group packed as query rows (enable_gqa is far slower for one token)."""
    k, v = (torch.randn((rows, model.kv_heads, tokens, model.head_dim), dtype=dtype, device=device) for _ in range(2))
    q = torch.randn((rows, model.kv_heads, model.group, model.head_dim), dtype=dtype, device=device)
    return lambda: scaled_dot_product_attention(q, k, v)


def flashinfer_decode(
    model: Model, rows: int, tokens: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], object] | None:
    """FlashInfer's decode over pages in random order, planned beforehand; None where it is not there or refuses."""
    if device.type != "cuda" or importlib.util.find_spec("flashinfer") is None:
        return None
    heads, pages = model.kv_heads, -(-tokens // PAGE)
    both = torch.randn((rows * pages, 2, PAGE, heads, model.head_dim), dtype=dtype, device=device)
    q = torch.randn((rows, heads * model.group, model.head_dim), dtype=dtype, device=device)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=device) * pages
    order = torch.randperm(rows * pages, device=device).int()
    last = torch.full((rows,), tokens - (pages - 1) * PAGE, dtype=torch.int32, device=device)
    try:
        room = torch.empty(128 << 20, dtype=torch.uint8, device=device)
        wrapper = importlib.import_module("flashinfer").BatchDecodeWithPagedKVCacheWrapper(
            room, "NHD", use_tensor_cores=True
        )
        sizes = (heads * model.group, heads, model.head_dim, PAGE)
        wrapper.plan(starts, order, last, *sizes, q_data_type=dtype, kv_data_type=dtype)
        wrapper.run(q, both)
    except Exception as error:  # another library's limits, whatever they are, must not end the check
        print(f"FlashInfer does not serve {model.name}: {type(error).__name__}: {error}", file=sys.stderr)
        return None
    return lambda: wrapper.run(q, both)


def decode_speeds(
    device: torch.device, backend: Backend, dtype: torch.dtype, models: tuple[Model, ...], sizes: list[tuple[int, int]]
) -> Iterator[Speed]:
    """Decode over sizes (rows, context), kept shares and layouts, and once with mass."""
    copy = copy_bandwidth(device, (1 << 30) if device.type == "cuda" else (1 << 26))
    for model in models:
        for rows, context in sizes:
            for keep, layout in ((1.0, "dense"), (0.5, "dense"), (0.2, "dense"), (0.5, "scattered")):
                cache = paged(model, rows, context, keep, layout, dtype, device)
                reference = sdpa_decode(model, rows, max(1, round(context * keep)), dtype, device)
                beside = median_ms(reference, device)
                other = flashinfer_decode(model, rows, max(1, round(context * keep)), dtype, device)
                flashinfer = None if other is None else median_ms(other, device)
                moved = 2 * rows * model.kv_heads * context * keep * model.head_dim * cache.k_pool_NSD.element_size()
                for mass in (False, True) if layout == "dense" and keep == 1.0 else (False,):
                    ms = median_ms(decode_call(model, cache, backend, mass), device)
                    rate = moved / ms / 1e6
                    name = "decode with mass" if mass else "decode"
                    kind = str(dtype).removeprefix("torch.")
                    measured = (ms, rate, rate / copy, beside, flashinfer)
                    yield Speed(name, model.name, kind, rows, context, keep, layout, *measured)


def prefill_speeds(
    device: torch.device, backend: Backend, dtype: torch.dtype, models: tuple[Model, ...], lengths: list[int]
) -> Iterator[Speed]:
    """Prefill of one sequence without and with column mass, beside causal SDPA with K and V already expanded."""
    copy = copy_bandwidth(device, 1 << 26)
    for model in models:
        for tokens in lengths:
            shape = (tokens, model.kv_heads, model.head_dim)
            k, v = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
            q = torch.randn((tokens, model.kv_heads * model.group, model.head_dim), dtype=dtype, device=device)
            wide = [x.transpose(0, 1).repeat_interleave(q.shape[1] // x.shape[1], 0)[None] for x in (q, k, v)]
            beside = median_ms(_causal(wide), device, 5)
            for mass in (False, True):
                ms = median_ms(_prefill(q, k, v, mass, backend), device, 5)
                rate = 2 * k.numel() * k.element_size() / ms / 1e6
                name = "prefill with mass" if mass else "prefill"
                kind = str(dtype).removeprefix("torch.")
                yield Speed(name, model.name, kind, 1, tokens, 1.0, "contiguous", ms, rate, rate / copy, beside)


def _causal(qkv: list[Tensor]) -> Callable[[], object]:
    q, k, v = qkv
    return lambda: scaled_dot_product_attention(q, k, v, is_causal=True)


def _prefill(q: Tensor, k: Tensor, v: Tensor, mass: bool, backend: Backend) -> Callable[[], object]:
    scale = q.shape[2] ** -0.5
    return lambda: ops.prefill_attention(q, k, v, scale=scale, want_mass=mass, backend=backend)


def move_speeds(
    device: torch.device, backend: Backend, dtype: torch.dtype, models: tuple[Model, ...], rows: int, pages: int
) -> Iterator[Speed]:
    """Append of one token a row, compaction of half a pool's slots and copy of half its pages, against a copy."""
    copy = copy_bandwidth(device, (1 << 30) if device.type == "cuda" else (1 << 26))
    for model in models:
        both = torch.randn((pages, 2, PAGE, model.head_dim), dtype=dtype, device=device)
        pools = (both[:, 0], both[:, 1], torch.zeros((pages, PAGE), dtype=torch.int32, device=device))
        for name, (call, count) in _moves(model, pools, rows, backend).items():
            ms = median_ms(call, device)
            rate = 2 * count * (2 * model.head_dim * both.element_size() + 4) / ms / 1e6
            kind = str(dtype).removeprefix("torch.")
            yield Speed(name, model.name, kind, rows, count, 1.0, "scattered", ms, rate, rate / copy)


def _moves(model: Model, pools: Pools, rows: int, backend: Backend) -> dict[str, tuple[Callable[[], object], int]]:
    """Calls by name, each with the number of slots it moves."""
    device, pages = pools[2].device, pools[2].shape[0]
    slots, ids = torch.randperm(pages * PAGE, device=device), torch.randperm(pages, device=device)
    half = slots.numel() // 2
    new = torch.randn((rows, model.kv_heads, model.head_dim), dtype=pools[0].dtype, device=device)
    position = torch.zeros(rows, dtype=torch.int32, device=device)
    targets = slots[: rows * model.kv_heads].view(rows, model.kv_heads)
    src, dst = slots[:half], slots[half : 2 * half]
    source, target = ids[: pages // 2], ids[pages // 2 : pages // 2 * 2]
    return {
        "append": (lambda: ops.append_kv(new, new, position, targets, *pools, backend=backend), targets.numel()),
        "compaction": (lambda: ops.copy_slots(src, dst, *pools, backend=backend), half),
        "page copy": (lambda: ops.copy_pages(source, target, *pools, backend=backend), half),
    }
