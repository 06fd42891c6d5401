"""Pieces that the attention and the mass kernel share: where slots lie, what is visible, queries and logits."""

# Kernel parameters are pointers and numbers that only Triton types.
# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
HIGHEST: tl.constexpr = tl.constexpr(2147483647)


@triton.jit
def locate(index, limit, tables_ptr, live_ptr, positions_ptr, positions_page, PAGED: tl.constexpr, S: tl.constexpr):
    """Page (int64), slot, position and live bit of slots `index` of a row and kv head; reads only what it may."""
    alive = index < limit
    if PAGED:
        logical = index // S
        slot = index % S
        word = tl.load(live_ptr + logical, mask=alive, other=0)
        alive = alive & (((word >> slot) & 1) != 0)
        page = tl.load(tables_ptr + logical, mask=alive, other=0).to(tl.int64)
        position = tl.load(positions_ptr + page * positions_page + slot, mask=alive, other=0)
    else:
        page = index.to(tl.int64)
        slot = index * 0
        position = index
    return page, slot, position, alive


@triton.jit
def exempted(position, exempt_ptr, spans):
    """Whether a position lies in any half-open span of the row."""
    inside = position < position
    for span in range(0, spans):
        start = tl.load(exempt_ptr + 2 * span)
        end = tl.load(exempt_ptr + 2 * span + 1)
        inside = inside | ((position >= start) & (position < end))
    return inside


@triton.jit
def logits2(q, q_sink, k, sink, scale, softcap, HAS_SINK: tl.constexpr, HAS_CAP: tl.constexpr):
    """Logits times log2(e): [BLOCK_M, BLOCK_N]. Sink columns are scored with the second query."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if HAS_SINK:
        s = tl.where(sink[None, :], tl.dot(q_sink, tl.trans(k), input_precision="ieee") * scale, s)
    if HAS_CAP:
        s = softcap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 * s / softcap)))  # tanh, right at both infinities
    return s * LOG2E


@triton.jit
def reachable(position, alive, p_low, p_high, lower, exempt_ptr, spans, window, HAS_LOWER: tl.constexpr):
    """Slots that some query with p_low <= p <= p_high and a bound of at least `lower` may see."""
    reach = alive & (position <= p_high) & (position > p_low - window)
    if HAS_LOWER:
        reach = reach & ((position >= lower) | exempted(position, exempt_ptr, spans))
    return reach


@triton.jit
def load_queries(
    q_ptr,
    q_sink_ptr,
    query,
    query_head,
    mask,
    d,
    q_token,
    sink_token,
    Q_HEAD: tl.constexpr,
    SINK_HEAD: tl.constexpr,
    HAS_SINK: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """The tile's queries and those that score sinks (without sinks the same): [BLOCK_M, BLOCK_D] twice."""
    q = tl.load(q_ptr + (query * q_token + query_head * Q_HEAD)[:, None] + d[None, :], mask=mask, other=0.0)
    q_sink = q
    if HAS_SINK:
        sink_at = (query * sink_token + query_head * SINK_HEAD)[:, None] + d[None, :]
        q_sink = tl.load(q_sink_ptr + sink_at, mask=mask, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
        q_sink = q_sink.to(tl.float32)
    return q, q_sink
