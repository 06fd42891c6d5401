"""CPU speed of the kernels beside contiguous SDPA in the same run: decode and extend over pages, prefill with mass.

    python benchmarks/kernels_cpu.py [--out FILE] [--repeats N]

Shape of SmolLM2-135M: 3 kv heads of 3 query heads each, head_dim 64, pages of 16 slots in random order. `native` is the
CPU's default, `torch` what is left without a C compiler. The calls of a row take turns, and each figure is the least of
its repeats, since other work on the machine only ever adds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvgate.kernels import ops, speed
from kvgate.kernels.check import machine
from kvgate.kernels.types import PagedKV

MODEL = speed.MODELS[-1]
CPU = torch.device("cpu")
Row = dict[str, float | str]


def least_ms(calls: dict[str, Callable[[], object]], repeats: int) -> Row:
    """Least milliseconds of each call, by name."""
    least = {name: float("inf") for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            least[name] = min(least[name], 1e3 * (time.perf_counter() - began))
    return {f"{name}_ms": value for name, value in least.items()}


def decode_row(rows: int, context: int, dtype: torch.dtype, repeats: int) -> Row:
    """A step over full pages against SDPA with the group packed as query rows."""
    cache = speed.paged(MODEL, rows, context, 1.0, "dense", dtype, CPU)
    return _decode(f"{rows} x {context}", cache, rows, context, dtype, repeats)


def forks_row(dtype: torch.dtype, repeats: int) -> Row:
    """40 rows of 4 contexts, pages shared, page counts 25, 50, 75 and 100 %: SDPA pads all to the longest."""
    cache = speed.paged(MODEL, 4, 1536, 1.0, "dense", dtype, CPU)
    counts = (torch.tensor([0.25, 0.5, 0.75, 1.0] * 10)[:, None] * (1536 // speed.PAGE)).int().expand(40, 3)
    tables, live = cache.tables_RHP.repeat(10, 1, 1), cache.live_RHP.repeat(10, 1, 1)
    forked = replace(cache, tables_RHP=tables, live_RHP=live, page_counts_RH=counts.contiguous())
    return _decode("40 forks x 384..1536", forked, 40, 1536, dtype, repeats)


def _decode(name: str, cache: PagedKV, rows: int, tokens: int, dtype: torch.dtype, repeats: int) -> Row:
    calls = {
        "sdpa": speed.sdpa_decode(MODEL, rows, tokens, dtype, CPU),
        "native": speed.decode_call(MODEL, cache, "native"),
        "native_mass": speed.decode_call(MODEL, cache, "native", True),
        "torch": speed.decode_call(MODEL, cache, "torch"),
    }
    return {"case": f"decode {name}", "dtype": str(dtype).removeprefix("torch."), **least_ms(calls, repeats)}


def extend_row(tokens: int, context: int, dtype: torch.dtype, repeats: int) -> Row:
    """Question tokens of one row over full pages; SDPA gets the group packed as query rows, and no mask at all."""
    cache = speed.paged(MODEL, 1, context, 1.0, "dense", dtype, CPU)
    q = torch.randn((tokens, MODEL.kv_heads * MODEL.group, MODEL.head_dim), dtype=dtype)
    at = torch.arange(context - tokens, context, dtype=torch.int32)
    tables = (cache.tables_RHP, cache.live_RHP, cache.page_counts_RH, cache.positions_NS)
    arguments = (q, cache.k_pool_NSD, cache.v_pool_NSD, *tables, at, torch.tensor([0, tokens], dtype=torch.int32))
    k, v = (torch.randn((1, MODEL.kv_heads, context, MODEL.head_dim), dtype=dtype) for _ in range(2))
    packed = torch.randn((1, MODEL.kv_heads, tokens * MODEL.group, MODEL.head_dim), dtype=dtype)
    scale = MODEL.head_dim**-0.5
    calls = {
        "sdpa": lambda: scaled_dot_product_attention(packed, k, v),
        "native": lambda: ops.extend_attention(*arguments, scale=scale, backend="native"),
        "native_mass": lambda: ops.extend_attention(*arguments, scale=scale, want_mass=True, backend="native"),
        "torch": lambda: ops.extend_attention(*arguments, scale=scale, backend="torch"),
    }
    name = str(dtype).removeprefix("torch.")
    return {"case": f"extend {tokens} over {context}", "dtype": name, **least_ms(calls, repeats)}


def prefill_row(tokens: int, dtype: torch.dtype, repeats: int) -> Row:
    """Causal prefill of one sequence; SDPA gets K and V already expanded to the query heads."""
    shape = (tokens, MODEL.kv_heads, MODEL.head_dim)
    k, v = (torch.randn(shape, dtype=dtype) for _ in range(2))
    q = torch.randn((tokens, MODEL.kv_heads * MODEL.group, MODEL.head_dim), dtype=dtype)
    wide = [x.transpose(0, 1).repeat_interleave(q.shape[1] // x.shape[1], 0)[None] for x in (q, k, v)]
    options = {"scale": MODEL.head_dim**-0.5, "backend": "native"}
    calls = {
        "sdpa": lambda: scaled_dot_product_attention(*wide, is_causal=True),
        "native": lambda: ops.prefill_attention(q, k, v, **options),
        "native_mass": lambda: ops.prefill_attention(q, k, v, want_mass=True, **options),
    }
    name = str(dtype).removeprefix("torch.")
    return {"case": f"prefill {tokens}", "dtype": name, **least_ms(calls, max(3, repeats // 4))}


def main() -> None:
    """Print the table, write it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    warm = torch.zeros(31 << 20, dtype=torch.uint8)  # once freed, the C library keeps memory between calls
    del warm
    table: list[Row] = []
    for dtype in (torch.bfloat16, torch.float32):
        table += [decode_row(rows, context, dtype, arguments.repeats) for rows, context in ((4, 2048), (16, 4096))]
        table.append(forks_row(dtype, arguments.repeats))
        table += [extend_row(new, held, dtype, arguments.repeats) for held in (2048, 4096) for new in (16, 32, 64)]
        table += [prefill_row(tokens, dtype, arguments.repeats) for tokens in (2048, 4096)]
    for row in table:
        parts = [f"{row['case']:28} {row['dtype']:9} sdpa {row['sdpa_ms']:7.2f} ms"]
        for name in ("native", "native_mass", "torch"):
            if f"{name}_ms" in row:
                ratio = float(row[f"{name}_ms"]) / float(row["sdpa_ms"])
                parts.append(f"{name} {row[f'{name}_ms']:7.2f} ms ({ratio:.2f})")
        print("  ".join(parts))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        body = {"schema_version": 1, "machine": machine(CPU), "rows": table}
        arguments.out.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
