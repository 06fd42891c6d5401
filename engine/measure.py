"""Measures what the choice between swapping and recomputing rests on: link bandwidth both ways and prefill speed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from kvgate.engine import swap
from kvgate.engine.engine import Engine
from kvgate.lifecycle.config import RecoveryConfig
from kvgate.lifecycle.ledger import Ledger


def measured_recovery(
    engine: Engine, base: RecoveryConfig, *, tokens: int = 256, timer: Callable[[], float] = time.perf_counter
) -> RecoveryConfig:
    """``base`` with rates measured on this engine, before it serves: nothing may be in its pool.

    Checksums and packing count as part of the link, since a swap pays for them. Prefill is measured at two lengths and
    fitted by a linear and a quadratic part.
    """
    assert engine.tables.pool.free == engine.tables.pool.total, "measure before serving"
    room = engine.tables.pool.total // engine.tables.geometry.heads * engine.tables.geometry.page_size
    long = max(2, min(tokens, room // 3, engine.info.max_positions - 1))
    short = max(1, long // 2)
    _prefill_seconds(engine, short, timer)  # warm up
    half, whole = _prefill_seconds(engine, short, timer), _prefill_seconds(engine, long, timer)
    # whole = a*long + b*long^2 and half likewise; a slope that comes out negative is noise.
    quadratic = max(0.0, (whole / long - half / short) / (long - short))
    linear = max(whole / long - quadratic * long, 1e-9)
    size, out_s, in_s = _link_seconds(engine, long, timer)
    return replace(
        base,
        out_bytes_per_s=size / max(out_s, 1e-9),
        in_bytes_per_s=size / max(in_s, 1e-9),
        prefill_tokens_per_s=1.0 / linear,
        prefill_quadratic_s=quadratic,
        bytes_per_block=engine.store.page_bytes * engine.tables.geometry.heads,
    )


def _prefill_seconds(engine: Engine, tokens: int, timer: Callable[[], float]) -> float:
    start = timer()
    row, logits = engine.prefill([1] * tokens)
    logits.sum().item()  # waits for the device
    took = timer() - start
    engine.release(row)
    return took


def _link_seconds(engine: Engine, tokens: int, timer: Callable[[], float]) -> tuple[int, float, float]:
    row, _ = engine.prefill([1] * tokens)
    start = timer()
    payload = swap.pack(engine, row.id, row.length)
    packed = timer()
    copy, _ = swap.unpack(engine, Ledger(engine.tables.pool), payload, 0)
    engine.store.k[:1].sum().item()
    unpacked = timer()
    engine.tables.release(copy)
    engine.release(row)
    return len(payload), packed - start, unpacked - packed
