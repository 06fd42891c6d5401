"""The plain reference: float64, one query head at a time, no page ever read that may not be read.

Slow on purpose: every backend is tested against it, so it must be obviously right.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvgate.kernels.types import Attention, PagedKV, Rules


def live_slots(cache: PagedKV, row: int, head: int) -> list[tuple[int, int]]:
    """(logical page, slot) of every live slot of a row and kv head, without reading entries beyond the page count."""
    count = int(cache.page_counts_RH[row, head])
    words = [int(word) & 0xFFFFFFFF for word in cache.live_RHP[row, head, :count]]
    return [(page, slot) for page, word in enumerate(words) for slot in range(cache.page_size) if word >> slot & 1]


def is_visible(k: int, p: int, lower: int | None, spans: list[tuple[int, int]], native_window: int | None) -> bool:
    """The visibility rule of `kvgate.kernels.types`, literally."""
    inside = lower is None or k >= lower or any(start <= k < end for start, end in spans)
    return k <= p and inside and (native_window is None or p - k < native_window)


def extend(
    q_TQD: Tensor, cache: PagedKV, query_position_T: Tensor, row_start: list[int], rules: Rules, want_mass: bool
) -> Attention:
    """Attention of several queries a row; row r owns queries row_start[r]:row_start[r + 1]. Everything float64."""
    tokens, query_heads, _ = q_TQD.shape
    rows, kv_heads, width = cache.tables_RHP.shape
    out = torch.zeros(q_TQD.shape, dtype=torch.float64)
    lse = torch.full((tokens, query_heads), float("-inf"), dtype=torch.float64)
    mass = torch.zeros((rows, kv_heads, width, cache.page_size), dtype=torch.float64)
    for row in range(rows):
        for head in range(kv_heads):
            slots = live_slots(cache, row, head)
            for token in range(row_start[row], row_start[row + 1]):
                _one_query(q_TQD, cache, query_position_T, rules, row, head, token, slots, out, lse, mass)
    return Attention(out, lse, mass if want_mass else None)


def _one_query(
    q_TQD: Tensor,
    cache: PagedKV,
    query_position_T: Tensor,
    rules: Rules,
    row: int,
    head: int,
    token: int,
    slots: list[tuple[int, int]],
    out: Tensor,
    lse: Tensor,
    mass: Tensor,
) -> None:
    p = int(query_position_T[token])
    lower = None if rules.lower is None else int(rules.lower[token])
    spans = [] if rules.exempt_RE2 is None else [(int(a), int(b)) for a, b in rules.exempt_RE2[row]]
    group = q_TQD.shape[1] // cache.tables_RHP.shape[1]
    pages = [int(cache.tables_RHP[row, head, page]) for page, _ in slots]
    found = [(int(cache.positions_NS[page, slot]), page, slot) for page, (_, slot) in zip(pages, slots, strict=True)]
    seen = [i for i, (k, _, _) in enumerate(found) if is_visible(k, p, lower, spans, rules.native_window)]
    if not seen:
        return
    page_ids = torch.tensor([found[i][1] for i in seen])
    slot_ids = torch.tensor([found[i][2] for i in seen])
    logical = torch.tensor([slots[i][0] for i in seen])
    k_nD = cache.k_pool_NSD[page_ids, slot_ids].double()
    v_nD = cache.v_pool_NSD[page_ids, slot_ids].double()
    for query_head in range(head * group, (head + 1) * group):
        logits = k_nD @ q_TQD[token, query_head].double()
        if rules.q_sink is not None and rules.sink_end_R is not None:
            sink = torch.tensor([found[i][0] < int(rules.sink_end_R[row]) for i in seen])
            logits = torch.where(sink, k_nD @ rules.q_sink[token, query_head].double(), logits)
        logits = logits * rules.scale
        if rules.softcap is not None:
            logits = rules.softcap * torch.tanh(logits / rules.softcap)
        weights = torch.softmax(logits, 0)
        out[token, query_head] = weights @ v_nD
        lse[token, query_head] = torch.logsumexp(logits, 0)
        mass[row, head, logical, slot_ids] += weights


def decode(q_RQD: Tensor, cache: PagedKV, query_position_R: Tensor, rules: Rules, want_mass: bool) -> Attention:
    """One query a row: `extend` with one token each."""
    return extend(q_RQD, cache, query_position_R, list(range(q_RQD.shape[0] + 1)), rules, want_mass)


def prefill(q_TQD: Tensor, k_THD: Tensor, v_THD: Tensor, rules: Rules, want_mass: bool) -> Attention:
    """Causal attention of one sequence over its own new tokens; mass [H, T]."""
    tokens, query_heads, _ = q_TQD.shape
    kv_heads = k_THD.shape[1]
    group = query_heads // kv_heads
    back = torch.arange(tokens)[:, None] - torch.arange(tokens)[None, :]
    seen = (back >= 0) & (back < (tokens if rules.native_window is None else rules.native_window))
    q = q_TQD.double().transpose(0, 1)
    k = k_THD.double().transpose(0, 1).repeat_interleave(group, 0)
    v = v_THD.double().transpose(0, 1).repeat_interleave(group, 0)
    logits = q @ k.transpose(1, 2) * rules.scale
    if rules.softcap is not None:
        logits = rules.softcap * torch.tanh(logits / rules.softcap)
    logits = logits.masked_fill(~seen, float("-inf"))
    weights = torch.softmax(logits, -1)
    mass = weights.view(kv_heads, group, tokens, tokens).sum((1, 2)) if want_mass else None
    return Attention((weights @ v).transpose(0, 1), torch.logsumexp(logits, -1).transpose(0, 1), mass)
