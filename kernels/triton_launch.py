"""What every attention kernel of a call is launched with: pointers, strides and compile-time flags."""

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor
from triton import knobs

from kvgate.kernels.tiles import Kind, Tile, attention_tile
from kvgate.kernels.types import PagedKV, Rules

NO_WINDOW = 1 << 30  # tokens: longer than any sequence, so the bound is always true


def interpreted() -> bool:
    """Whether kernels run under Triton's interpreter (TRITON_INTERPRET=1 when triton was imported)."""
    return bool(knobs.runtime.interpret)


def _hopper() -> bool:
    """Whether the GPU in use has wgmma; the interpreter follows the newer tiles."""
    return interpreted() or int(triton.runtime.driver.active.get_current_target().arch) >= 90


@dataclass(frozen=True, slots=True)
class Launch:
    """What every kernel of a call needs: tensors, strides and flags, whether K and V are paged or contiguous."""

    q: Tensor
    k: Tensor
    v: Tensor
    cache: PagedKV | None
    query_position: Tensor
    row_start: Tensor
    rules: Rules
    kv_heads: int
    rows: int

    @property
    def group(self) -> int:
        return int(self.q.shape[1]) // self.kv_heads

    @property
    def q_sink(self) -> Tensor:
        return self.q if self.rules.q_sink is None else self.rules.q_sink

    def tile(self, kind: Kind) -> Tile:
        """Tile for the rows of a kind."""
        sinks, paged, size = self.rules.q_sink is not None, self.cache is not None, self.q.element_size()
        return attention_tile(kind, int(self.q.shape[2]), self.group, size, sinks, paged, _hopper())

    def pointers(self) -> dict[str, Tensor]:
        """Pointer arguments; unused ones get a tensor that the kernel does not read."""
        unused = self.row_start
        cache, rules = self.cache, self.rules
        return {
            "q_ptr": self.q,
            "q_sink_ptr": self.q_sink,
            "k_ptr": self.k,
            "positions_ptr": unused if cache is None else cache.positions_NS,
            "tables_ptr": unused if cache is None else cache.tables_RHP,
            "live_ptr": unused if cache is None else cache.live_RHP,
            "counts_ptr": unused if cache is None else cache.page_counts_RH,
            "query_position_ptr": self.query_position,
            "lower_ptr": unused if rules.lower is None else rules.lower,
            "exempt_ptr": unused if rules.exempt_RE2 is None else rules.exempt_RE2.contiguous(),
            "sink_end_ptr": unused if rules.sink_end_R is None else rules.sink_end_R,
            "row_start_ptr": self.row_start,
        }

    def numbers(self) -> dict[str, int | float]:
        """Strides in elements and scalars."""
        cache, rules = self.cache, self.rules
        return {
            "q_token": self.q.stride(0),
            "sink_token": self.q_sink.stride(0),
            "k_page": self.k.stride(0),
            "positions_page": 0 if cache is None else cache.positions_NS.stride(0),
            "tables_row": 0 if cache is None else cache.tables_RHP.stride(0),
            "tables_head": 0 if cache is None else cache.tables_RHP.stride(1),
            "live_row": 0 if cache is None else cache.live_RHP.stride(0),
            "live_head": 0 if cache is None else cache.live_RHP.stride(1),
            "counts_row": 0 if cache is None else cache.page_counts_RH.stride(0),
            "counts_head": 0 if cache is None else cache.page_counts_RH.stride(1),
            "spans": 0 if rules.exempt_RE2 is None or rules.lower is None else int(rules.exempt_RE2.shape[1]),
            "window": NO_WINDOW if rules.native_window is None else min(rules.native_window, NO_WINDOW),
            "scale": rules.scale,
            "softcap": rules.softcap or 1.0,
        }

    def constants(self) -> dict[str, int | bool]:
        """Compile-time arguments that all kernels share."""
        return {
            "G": self.group,
            "D": int(self.q.shape[2]),
            "S": self.cache.page_size if self.cache is not None else 1,
            "Q_HEAD": self.q.stride(1),
            "SINK_HEAD": self.q_sink.stride(1),
            "K_SLOT": self.k.stride(1),
            "PAGED": self.cache is not None,
            "HAS_LOWER": self.rules.lower is not None,
            "HAS_SINK": self.rules.q_sink is not None,
            "HAS_CAP": self.rules.softcap is not None,
            "UPCAST": interpreted(),
        }
