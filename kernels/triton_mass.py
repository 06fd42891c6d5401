"""Triton attention mass per slot, fp32 and without atomics: every sum has one owner and one order."""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

import triton
import triton.language as tl

from kvgate.kernels.triton_parts import HIGHEST, exempted, load_queries, locate, logits2


@triton.jit
def score_mass_kernel(
    scores_ptr,
    max_ptr,
    sum_ptr,
    counts_ptr,
    mass_ptr,
    counts_row,
    counts_head,
    width,
    G: tl.constexpr,
    S: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid (rows, H, blocks of slots), decode: the stored base-2 logits [R, Q, width] against their max and sum.

    Writes every slot of the table, zeros beyond the page count.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    limit = tl.load(counts_ptr + row * counts_row + head * counts_head) * S
    g = tl.arange(0, BLOCK_G)
    index = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    query = (row * heads + head) * G + g
    highest = tl.load(max_ptr + query, mask=g < G, other=0.0)
    total = tl.load(sum_ptr + query, mask=g < G, other=0.0)
    there = (g < G)[:, None] & (index < limit)[None, :] & (total > 0.0)[:, None]
    s = tl.load(scores_ptr + query[:, None] * width + index[None, :], mask=there, other=float("-inf"))
    safe = tl.where(total > 0.0, highest, 0.0)
    weights = tl.exp2(s - safe[:, None]) / tl.where(total > 0.0, total, 1.0)[:, None]
    tl.store(mass_ptr + (row * heads + head) * width + index, tl.sum(weights, 0), mask=index < width)


@triton.jit
def column_mass_kernel(
    q_ptr,
    q_sink_ptr,
    k_ptr,
    positions_ptr,
    tables_ptr,
    live_ptr,
    counts_ptr,
    query_position_ptr,
    lower_ptr,
    exempt_ptr,
    sink_end_ptr,
    row_start_ptr,
    max_ptr,
    sum_ptr,
    mass_ptr,
    q_token,
    sink_token,
    k_page,
    positions_page,
    tables_row,
    tables_head,
    live_row,
    live_head,
    counts_row,
    counts_head,
    width,
    spans,
    window,
    scale,
    softcap,
    G: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    Q_HEAD: tl.constexpr,
    SINK_HEAD: tl.constexpr,
    K_SLOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGED: tl.constexpr,
    HAS_LOWER: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HAS_CAP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid (blocks of slots, H, rows): the logits once more, column sums over all queries of the row in order."""
    TOKENS: tl.constexpr = BLOCK_M // G
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1)
    start = tl.load(row_start_ptr + row)
    end = tl.load(row_start_ptr + row + 1)
    if PAGED:
        limit = tl.load(counts_ptr + row * counts_row + head * counts_head) * S
        tables_ptr += row * tables_row + head * tables_head
        live_ptr += row * live_row + head * live_head
    else:
        limit = end
        k_ptr += head * K_SLOT
    exempt_ptr += row * spans * 2
    index = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    page, slot, position, alive = locate(index, limit, tables_ptr, live_ptr, positions_ptr, positions_page, PAGED, S)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    d_ok = (d < D)[None, :]
    k = tl.load(k_ptr + (page * k_page + slot * K_SLOT)[:, None] + d[None, :], mask=alive[:, None] & d_ok, other=0.0)
    if UPCAST:
        k = k.to(tl.float32)
    sink_end = tl.load(sink_end_ptr + row) if HAS_SINK else 0
    free = exempted(position, exempt_ptr, spans) if HAS_LOWER else alive
    earliest = tl.min(tl.where(alive, position, HIGHEST), 0)
    column = tl.zeros([BLOCK_N], tl.float32)
    for first in range(start, end, TOKENS):
        token = first + m // G
        m_ok = (m < TOKENS * G) & (token < end)
        query = token.to(tl.int64)
        p = tl.load(query_position_ptr + query, mask=m_ok, other=-1) if PAGED else token
        if tl.max(p, 0) >= earliest:
            query_head = head * G + m % G
            q_mask = m_ok[:, None] & d_ok
            q, q_sink = load_queries(
                q_ptr,
                q_sink_ptr,
                query,
                query_head,
                q_mask,
                d,
                q_token,
                sink_token,
                Q_HEAD,
                SINK_HEAD,
                HAS_SINK,
                UPCAST,
            )
            at = query * heads * G + query_head
            highest = tl.load(max_ptr + at, mask=m_ok, other=0.0)
            total = tl.load(sum_ptr + at, mask=m_ok, other=0.0)
            m_ok = m_ok & (total > 0.0)
            s = logits2(q, q_sink, k, position < sink_end, scale, softcap, HAS_SINK, HAS_CAP)
            seen = alive[None, :] & (position[None, :] <= p[:, None]) & (position[None, :] > p[:, None] - window)
            if HAS_LOWER:
                lower = tl.load(lower_ptr + query, mask=m_ok, other=0)
                seen = seen & ((position[None, :] >= lower[:, None]) | free[None, :])
            seen = seen & m_ok[:, None]
            safe = tl.where(m_ok, highest, 0.0)
            weights = tl.exp2(tl.where(seen, s, float("-inf")) - safe[:, None])
            column += tl.sum(weights / tl.where(m_ok, total, 1.0)[:, None], 0)
    tl.store(mass_ptr + (row * heads + head) * width + index, column, mask=index < width)
