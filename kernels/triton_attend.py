"""Triton attention over pages: one kernel for decode and prefill, and the merge of its splits.

A program owns a tile of queries (the G query heads of a kv head packed beside the tokens) and a range of slots: a split
at an absolute multiple of SPLIT, so that no result depends on the batch, or (SPLIT = 0) everything the tile can see.
Online softmax after Milakov and Gimelshein (2018), in base 2; the running maximum starts at -inf and stays there while
nothing is visible, so an empty split is neutral. UPCAST is for the interpreter, which is silently wrong in bf16.
"""

# Kernel parameters are pointers and numbers that only Triton types.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

import triton
import triton.language as tl

from kvgate.kernels.triton_parts import HIGHEST, exempted, load_queries, locate, logits2, reachable

LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def attend_kernel(
    q_ptr,
    q_sink_ptr,
    k_ptr,
    v_ptr,
    positions_ptr,
    tables_ptr,
    live_ptr,
    counts_ptr,
    query_position_ptr,
    lower_ptr,
    exempt_ptr,
    sink_end_ptr,
    row_start_ptr,
    tile_row_ptr,
    tile_first_ptr,
    out_ptr,
    lse_ptr,
    max_ptr,
    sum_ptr,
    scores_ptr,
    q_token,
    sink_token,
    k_page,
    v_page,
    positions_page,
    tables_row,
    tables_head,
    live_row,
    live_head,
    counts_row,
    counts_head,
    scores_width,
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
    V_SLOT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    PAGED: tl.constexpr,
    TILED: tl.constexpr,
    HAS_LOWER: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HAS_CAP: tl.constexpr,
    STORE_SCORES: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid (tiles, H, splits). Without SPLIT, out [T, Q, D], lse and the softmax's max and sum [T, Q] are final.

    With SPLIT, `out_ptr`, `max_ptr` and `sum_ptr` are the split's own, fp32 [tiles, H, splits, TOKENS * G (, D)].
    K_SLOT and V_SLOT are the strides of a page's slots, or of the heads where K and V are contiguous. `window` is a
    number of tokens; callers without one pass 2**30.
    """
    TOKENS: tl.constexpr = BLOCK_M // G
    tile = tl.program_id(0)
    head = tl.program_id(1)
    split = tl.program_id(2)
    heads = tl.num_programs(1)
    row = tl.load(tile_row_ptr + tile).to(tl.int64) if TILED else tile.to(tl.int64)
    first = tl.load(tile_first_ptr + tile) if TILED else tile
    end = tl.load(row_start_ptr + row + 1) if TILED else tile + 1
    if PAGED:
        limit = tl.load(counts_ptr + row * counts_row + head * counts_head) * S
        tables_ptr += row * tables_row + head * tables_head
        live_ptr += row * live_row + head * live_head
    else:
        limit = end
        k_ptr += head * K_SLOT
        v_ptr += head * V_SLOT
    if SPLIT > 0 and split * SPLIT >= limit:
        return
    exempt_ptr += row * spans * 2

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    d_ok = (d < D)[None, :]
    token = first + m // G
    m_ok = (m < TOKENS * G) & (token < end)  # beyond them lies the next kv head or the next row
    query = token.to(tl.int64)
    query_head = head * G + m % G
    q_mask = m_ok[:, None] & d_ok
    q, q_sink = load_queries(
        q_ptr, q_sink_ptr, query, query_head, q_mask, d, q_token, sink_token, Q_HEAD, SINK_HEAD, HAS_SINK, UPCAST
    )
    sink_end = tl.load(sink_end_ptr + row) if HAS_SINK else 0
    p = tl.load(query_position_ptr + query, mask=m_ok, other=0) if PAGED else token
    p_high = tl.max(tl.where(m_ok, p, -1), 0)
    p_low = tl.min(tl.where(m_ok, p, HIGHEST), 0)
    lower = p * 0
    if HAS_LOWER:
        lower = tl.load(lower_ptr + query, mask=m_ok, other=HIGHEST)
    lowest = tl.min(lower, 0)

    begin = split * SPLIT
    stop = limit
    if SPLIT > 0:
        stop = tl.minimum(begin + SPLIT, limit)
    elif PAGED:
        SCAN: tl.constexpr = 1024
        scan = tl.arange(0, SCAN)
        after = scan * 0
        before = scan * 0 + limit
        for base in range(0, limit, SCAN):
            index = base + scan
            _, _, position, alive = locate(index, limit, tables_ptr, live_ptr, positions_ptr, positions_page, PAGED, S)
            reach = reachable(position, alive, p_low, p_high, lowest, exempt_ptr, spans, window, HAS_LOWER)
            after = tl.maximum(after, tl.where(reach, index + 1, 0))
            before = tl.minimum(before, tl.where(reach, index, limit))
        stop = tl.max(after, 0)
        begin = tl.min(before, 0) // BLOCK_N * BLOCK_N
    else:
        stop = tl.minimum(limit, p_high + 1)
        begin = tl.maximum(p_low - window + 1, 0) // BLOCK_N * BLOCK_N

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    n = tl.arange(0, BLOCK_N)
    for base in range(begin, stop, BLOCK_N):
        index = base + n
        page, slot, position, alive = locate(
            index, limit, tables_ptr, live_ptr, positions_ptr, positions_page, PAGED, S
        )
        wanted = alive
        if SPLIT > 0:  # few queries: loads are what costs, so only what they can see; else a shorter chain of loads
            wanted = reachable(position, alive, p_low, p_high, lowest, exempt_ptr, spans, window, HAS_LOWER)
        kv_mask = wanted[:, None] & d_ok
        k = tl.load(k_ptr + (page * k_page + slot * K_SLOT)[:, None] + d[None, :], mask=kv_mask, other=0.0)
        v = tl.load(v_ptr + (page * v_page + slot * V_SLOT)[:, None] + d[None, :], mask=kv_mask, other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        s = logits2(q, q_sink, k, position < sink_end, scale, softcap, HAS_SINK, HAS_CAP)
        seen = wanted[None, :] & (position[None, :] <= p[:, None]) & (position[None, :] > p[:, None] - window)
        if HAS_LOWER:
            free = exempted(position, exempt_ptr, spans)
            seen = seen & ((position[None, :] >= lower[:, None]) | free[None, :])
        s = tl.where(seen, s, float("-inf"))
        if STORE_SCORES:
            at = (query * heads * G + query_head) * scores_width
            tl.store(scores_ptr + at[:, None] + index[None, :], s, mask=m_ok[:, None] & (index < limit)[None, :])
        new = tl.maximum(highest, tl.max(s, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        shrink = tl.exp2(highest - safe)
        weights = tl.exp2(s - safe[:, None])
        total = total * shrink + tl.sum(weights, 1)
        if not UPCAST:
            weights = weights.to(v.dtype)
        acc = acc * shrink[:, None] + tl.dot(weights, v, input_precision="ieee")
        highest = new

    if SPLIT > 0:
        part = ((tile.to(tl.int64) * heads + head) * tl.num_programs(2) + split) * (TOKENS * G) + m
        tl.store(out_ptr + part[:, None] * D + d[None, :], acc, mask=q_mask)
        tl.store(max_ptr + part, highest, mask=m_ok)
        tl.store(sum_ptr + part, total, mask=m_ok)
    else:
        at = query * heads * G + query_head
        whole = tl.where(total == 0.0, 1.0, total)
        lse = tl.where(total == 0.0, float("-inf"), highest * LN2 + tl.log(whole))
        tl.store(
            out_ptr + at[:, None] * D + d[None, :], (acc / whole[:, None]).to(out_ptr.dtype.element_ty), mask=q_mask
        )
        tl.store(lse_ptr + at, lse, mask=m_ok)
        tl.store(max_ptr + at, highest, mask=m_ok)
        tl.store(sum_ptr + at, total, mask=m_ok)


@triton.jit
def merge_kernel(
    part_ptr,
    part_max_ptr,
    part_sum_ptr,
    counts_ptr,
    row_start_ptr,
    tile_row_ptr,
    tile_first_ptr,
    out_ptr,
    lse_ptr,
    max_ptr,
    sum_ptr,
    counts_row,
    counts_head,
    splits,
    G: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    USED: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    TILED: tl.constexpr,
):
    """Grid (tiles, H, USED = TOKENS * G): merges a query's splits by log-sum-exp, in order, those with slots only."""
    BLOCK: tl.constexpr = 16
    tile = tl.program_id(0)
    head = tl.program_id(1)
    m = tl.program_id(2)
    heads = tl.num_programs(1)
    row = tl.load(tile_row_ptr + tile).to(tl.int64) if TILED else tile.to(tl.int64)
    token = (tl.load(tile_first_ptr + tile) if TILED else tile) + m // G
    end = tl.load(row_start_ptr + row + 1) if TILED else tile + 1
    if token >= end:
        return
    limit = tl.load(counts_ptr + row * counts_row + head * counts_head) * S
    filled = (limit + SPLIT - 1) // SPLIT
    d = tl.arange(0, BLOCK_D)
    i = tl.arange(0, BLOCK)
    highest = tl.max(tl.full([BLOCK], float("-inf"), tl.float32), 0)
    total = tl.sum(tl.zeros([BLOCK], tl.float32), 0)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for base in range(0, filled, BLOCK):
        there = base + i < filled
        part = ((tile.to(tl.int64) * heads + head) * splits + base + i) * USED + m
        peak = tl.load(part_max_ptr + part, mask=there, other=float("-inf"))
        mass = tl.load(part_sum_ptr + part, mask=there, other=0.0)
        load = there[:, None] & (d < D)[None, :]
        values = tl.load(part_ptr + part[:, None] * D + d[None, :], mask=load, other=0.0)
        new = tl.maximum(highest, tl.max(peak, 0))
        safe = tl.where(new == float("-inf"), 0.0, new)
        shrink = tl.exp2(highest - safe)
        share = tl.exp2(peak - safe)
        total = total * shrink + tl.sum(mass * share, 0)
        acc = acc * shrink + tl.sum(values * share[:, None], 0)
        highest = new
    at = token.to(tl.int64) * heads * G + head * G + m % G
    whole = tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + at * D + d, (acc / whole).to(out_ptr.dtype.element_ty), mask=d < D)
    tl.store(lse_ptr + at, tl.where(total == 0.0, float("-inf"), highest * LN2 + tl.log(whole)))
    tl.store(max_ptr + at, highest)
    tl.store(sum_ptr + at, total)
