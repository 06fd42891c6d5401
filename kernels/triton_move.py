"""Triton's one mover of slots: append, compaction, copy-on-write and swap are all a gather or scatter of slots.

A slot address on either side is outer * OUTER stride + inner * INNER stride, with outer and inner from a flat slot
number: page and slot in a pool, token and head in new K and V, page and slot in a buffer for the host.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

import triton
import triton.language as tl


@triton.jit
def flat_slot(i, ids_ptr, there, INDEXED: tl.constexpr, UNIT: tl.constexpr):
    """Flat slot of the i-th moved slot; ids name units of UNIT slots (a page, or a slot). int64."""
    if INDEXED:
        return tl.load(ids_ptr + i // UNIT, mask=there, other=0).to(tl.int64) * UNIT + i % UNIT
    return i


@triton.jit
def move_kernel(
    src_k_ptr,
    src_v_ptr,
    src_positions_ptr,
    src_ids_ptr,
    dst_k_ptr,
    dst_v_ptr,
    dst_positions_ptr,
    dst_ids_ptr,
    count,
    src_k_outer,
    src_v_outer,
    src_positions_outer,
    dst_k_outer,
    dst_v_outer,
    dst_positions_outer,
    D: tl.constexpr,
    UNIT: tl.constexpr,
    SRC_INDEXED: tl.constexpr,
    DST_INDEXED: tl.constexpr,
    SRC_SIZE: tl.constexpr,
    DST_SIZE: tl.constexpr,
    SRC_K_INNER: tl.constexpr,
    SRC_V_INNER: tl.constexpr,
    SRC_POSITIONS_INNER: tl.constexpr,
    DST_K_INNER: tl.constexpr,
    DST_V_INNER: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (blocks of BLOCK slots): K, V and position of `count` slots travel together."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = i < count
    d = tl.arange(0, BLOCK_D)
    mask = there[:, None] & (d < D)[None, :]
    src = flat_slot(i, src_ids_ptr, there, SRC_INDEXED, UNIT)
    dst = flat_slot(i, dst_ids_ptr, there, DST_INDEXED, UNIT)
    src_outer = src // SRC_SIZE
    src_inner = src % SRC_SIZE
    dst_outer = dst // DST_SIZE
    dst_inner = dst % DST_SIZE
    k = tl.load(src_k_ptr + (src_outer * src_k_outer + src_inner * SRC_K_INNER)[:, None] + d[None, :], mask=mask)
    v = tl.load(src_v_ptr + (src_outer * src_v_outer + src_inner * SRC_V_INNER)[:, None] + d[None, :], mask=mask)
    position = tl.load(
        src_positions_ptr + src_outer * src_positions_outer + src_inner * SRC_POSITIONS_INNER, mask=there
    )
    tl.store(dst_k_ptr + (dst_outer * dst_k_outer + dst_inner * DST_K_INNER)[:, None] + d[None, :], k, mask=mask)
    tl.store(dst_v_ptr + (dst_outer * dst_v_outer + dst_inner * DST_V_INNER)[:, None] + d[None, :], v, mask=mask)
    tl.store(dst_positions_ptr + dst_outer * dst_positions_outer + dst_inner, position, mask=there)
