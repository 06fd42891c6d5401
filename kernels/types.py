"""Words and records of the kernels room.

Shape legend (suffixes of tensor names):
    R  rows: sequences in the launch          H  kv heads
    G  query heads of one kv head             Q  query heads, Q = H * G; query head q reads kv head q // G
    T  new tokens of all rows, row by row     D  head_dim
    N  pages of the pool                      S  page_size, slots of a page (at most 32: one live word)
    P  table width, logical pages of a row    E  exempt spans of a row
    M  slots named in a copy

A page is S slots of one kv head of one layer. All layers share a pool; a call is about one layer. The slot order
inside a page is arbitrary: `positions_NS` says which token a slot holds.

A slot is dereferenced only if its page is below the row's page count and its live bit is set: everything else may hold
NaN, garbage or freed page ids. A live slot with position k is visible to a query at position p of row r when
    k <= p  and  (k >= lower[query] or k in an exempt span of r)  and  (native_window is None or p - k < native_window)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Backend = Literal["torch", "triton", "native"]
Pools = tuple[Tensor, Tensor, Tensor]  # k_pool_NSD, v_pool_NSD, positions_NS
MAX_PAGE_SIZE = 32


@dataclass(frozen=True, slots=True)
class Attention:
    """Result of an attention call.

    out: [..., Q, D] in the dtype of the queries; zeros for a query that sees nothing.
    lse: fp32, [..., Q]: natural log of the sum of exp(logit), logits scaled and capped; -inf if nothing is visible.
    mass: fp32 probability per slot, summed over the row's queries and the G query heads of the kv head:
        [R, H, P, S] for paged calls, [H, T] for `prefill_attention`, None unless asked for. Zero where not visible.
    """

    out: Tensor
    lse: Tensor
    mass: Tensor | None


@dataclass(frozen=True, slots=True)
class PagedKV:
    """One layer's cache as the kernels see it (shapes in the module's legend).

    k_pool_NSD, v_pool_NSD: same dtype, last dim contiguous, other strides free. positions_NS: int32.
    tables_RHP: int32 page ids. live_RHP: int32 bit words, bit s is slot s. page_counts_RH: int32.
    """

    k_pool_NSD: Tensor
    v_pool_NSD: Tensor
    positions_NS: Tensor
    tables_RHP: Tensor
    live_RHP: Tensor
    page_counts_RH: Tensor

    @property
    def page_size(self) -> int:
        return int(self.k_pool_NSD.shape[1])

    @property
    def head_dim(self) -> int:
        return int(self.k_pool_NSD.shape[2])


@dataclass(frozen=True, slots=True)
class Rules:
    """How logits are made and which slots a query may see.

    lower: int32 per query ([R] for decode, [T] for extend) or None. exempt_RE2: int32 half-open spans or None.
    sink_end_R and q_sink come together: visible slots with k < sink_end are scored with q_sink instead of q.
    softcap: logits become softcap * tanh(logit / softcap) after scaling (Gemma 2, section 2 of its report).
    """

    scale: float
    lower: Tensor | None = None
    exempt_RE2: Tensor | None = None
    sink_end_R: Tensor | None = None
    q_sink: Tensor | None = None
    native_window: int | None = None
    softcap: float | None = None
