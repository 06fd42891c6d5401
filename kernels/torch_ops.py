"""Attention over pages in plain torch: the CPU's way, and a second opinion on a GPU.

Rows with the same number of new tokens and similar page counts go together, in chunks whose gathered K stays in the
CPU's cache: padding every row to the longest, or gathering more than the cache holds, costs several times as much.
Logits, softmax and mass are fp32 whatever the dtype; only the weights are rounded to it before they meet V.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvgate.kernels.torch_prefill import prefill as prefill
from kvgate.kernels.types import Attention, PagedKV, Rules

_CHUNK_BYTES = 1 << 20  # of gathered K per chunk of rows: stays in the last-level cache
NEVER = torch.iinfo(torch.int32).max  # position of a dead slot: later than any query
_BLOCK_LOGITS = 1 << 20  # logits of one query block


@dataclass(frozen=True, slots=True)
class _Keys:
    """K, V and positions of a chunk of rows, padded to one width n = pages * S.

    Dead slots: position NEVER, V zero, K whatever the pool holds (its logits are overwritten).
    """

    k_BHnD: Tensor
    v_BHnD: Tensor
    positions_BHn: Tensor


def decode(q_RQD: Tensor, cache: PagedKV, query_position_R: Tensor, rules: Rules, want_mass: bool) -> Attention:
    """One query a row."""
    return extend(q_RQD, cache, query_position_R, list(range(q_RQD.shape[0] + 1)), rules, want_mass)


def extend(
    q_TQD: Tensor, cache: PagedKV, query_position_T: Tensor, row_start: list[int], rules: Rules, want_mass: bool
) -> Attention:
    """Several queries a row: row r owns queries row_start[r]:row_start[r + 1]."""
    rows, kv_heads, width = cache.tables_RHP.shape
    out = torch.zeros_like(q_TQD)
    lse = torch.full(q_TQD.shape[:2], float("-inf"), dtype=torch.float32, device=q_TQD.device)
    mass: Tensor | None = None
    if want_mass:
        mass = torch.zeros((rows, kv_heads, width, cache.page_size), dtype=torch.float32, device=q_TQD.device)
    for members, pages in _chunks(cache, row_start):
        tokens = row_start[members[0] + 1] - row_start[members[0]]
        keys = _gather(cache, torch.tensor(members, device=q_TQD.device), pages)
        block = max(1, _BLOCK_LOGITS // (keys.positions_BHn.numel() * (q_TQD.shape[1] // kv_heads)))
        for first in range(0, tokens, block):
            last = min(tokens, first + block)
            index = torch.tensor([range(row_start[r] + first, row_start[r] + last) for r in members]).to(q_TQD.device)
            part = _attend(q_TQD, keys, query_position_T, rules, index, members, want_mass)
            out[index], lse[index] = part.out, part.lse
            if mass is not None and part.mass is not None:
                mass[members, :, :pages] += part.mass.view(len(members), kv_heads, pages, cache.page_size)
    return Attention(out, lse, mass)


def _chunks(cache: PagedKV, row_start: list[int]) -> Iterator[tuple[list[int], int]]:
    """Rows to go together and the pages they are padded to. Which bucket a row is in depends on that row alone."""
    rows, kv_heads, _ = cache.tables_RHP.shape
    counts: list[int] = cache.page_counts_RH.amax(1).tolist() if rows and kv_heads else []
    buckets: dict[tuple[int, int], list[int]] = {}
    for row, count in enumerate(counts):
        tokens = row_start[row + 1] - row_start[row]
        if count and tokens:
            step = max(1, 1 << max(0, count.bit_length() - 4))  # at most an eighth of padding
            buckets.setdefault((tokens, -(-count // step) * step), []).append(row)
    page_bytes = kv_heads * cache.page_size * cache.head_dim * cache.k_pool_NSD.element_size()
    for members in buckets.values():
        pages = max(counts[row] for row in members)
        size = max(1, _CHUNK_BYTES // (pages * page_bytes))
        for first in range(0, len(members), size):
            yield members[first : first + size], pages


def _gather(cache: PagedKV, rows: Tensor, pages: int) -> _Keys:
    """Whole pages by index_select; a page that may not be read is replaced by page 0 with all its slots dead."""
    size, dim = cache.page_size, cache.head_dim
    words = cache.live_RHP.index_select(0, rows)[:, :, :pages]
    beyond = torch.arange(pages, device=words.device) >= cache.page_counts_RH.index_select(0, rows)[..., None]
    words = words.masked_fill(beyond, 0)
    ids = cache.tables_RHP.index_select(0, rows)[:, :, :pages].masked_fill(words == 0, 0)
    flat = ids.reshape(-1)
    bits = torch.ones(size, dtype=torch.int32, device=words.device) << torch.arange(
        size, dtype=torch.int32, device=words.device
    )
    dead = (words[..., None] & bits).view(-1) == 0
    positions = cache.positions_NS.index_select(0, flat).view(-1).masked_fill_(dead, NEVER)
    k = cache.k_pool_NSD.index_select(0, flat)
    v = cache.v_pool_NSD.index_select(0, flat)
    v.view(-1, dim).index_fill_(0, dead.nonzero().view(-1), 0)  # zero times NaN would be NaN
    shape = (*ids.shape[:2], pages * size)
    return _Keys(k.view(*shape, dim), v.view(*shape, dim), positions.view(shape))


def _visible(
    keys: _Keys, p_BT: Tensor, lower_BT: Tensor | None, exempt_BE2: Tensor | None, window: int | None
) -> Tensor:
    """bool [B, H, T, n]: the rule in `kvgate.kernels.types`."""
    k = keys.positions_BHn[:, :, None]
    p = p_BT[:, None, :, None]
    seen = k <= p
    if lower_BT is not None:
        inside = k >= lower_BT[:, None, :, None]
        for span in exempt_BE2.unbind(1) if exempt_BE2 is not None else ():
            start, end = span[:, 0, None, None, None], span[:, 1, None, None, None]
            inside = inside | ((k >= start) & (k < end))
        seen &= inside
    if window is not None:
        seen &= k > p - window
    return seen


def _logits(q_TQD: Tensor, keys: _Keys, rules: Rules, index_BT: Tensor, rows: list[int]) -> Tensor:
    """Scaled, capped fp32 logits [B * H, T * G, n]."""
    batch, kv_heads, n, dim = keys.k_BHnD.shape
    tokens, group = index_BT.shape[1], q_TQD.shape[1] // kv_heads

    def packed(q: Tensor) -> Tensor:
        grouped = q[index_BT].view(batch, tokens, kv_heads, group, dim).permute(0, 2, 1, 3, 4)
        return grouped.reshape(batch * kv_heads, tokens * group, dim).float() * rules.scale

    k_t = keys.k_BHnD.view(-1, n, dim).float().transpose(1, 2)
    logits = torch.bmm(packed(q_TQD), k_t)
    if rules.q_sink is not None and rules.sink_end_R is not None:
        sink = keys.positions_BHn < rules.sink_end_R[rows][:, None, None]
        columns = sink.flatten(0, 1).any(0).nonzero().view(-1)
        second = torch.bmm(packed(rules.q_sink), k_t.index_select(2, columns))
        chosen = sink.view(-1, 1, n).index_select(2, columns)
        logits[:, :, columns] = torch.where(chosen, second, logits.index_select(2, columns))
    if rules.softcap is not None:
        logits = logits.div_(rules.softcap).tanh_().mul_(rules.softcap)
    return logits


def _attend(
    q_TQD: Tensor,
    keys: _Keys,
    query_position_T: Tensor,
    rules: Rules,
    index_BT: Tensor,
    rows: list[int],
    want_mass: bool,
) -> Attention:
    """The queries `index_BT` of a chunk: out [B, T, Q, D], lse [B, T, Q], mass [B, H, n]."""
    batch, kv_heads, n, dim = keys.k_BHnD.shape
    tokens, group = index_BT.shape[1], q_TQD.shape[1] // kv_heads
    lower = None if rules.lower is None else rules.lower[index_BT]
    exempt = None if rules.exempt_RE2 is None else rules.exempt_RE2[rows]
    seen = _visible(keys, query_position_T[index_BT], lower, exempt, rules.native_window)
    logits = _logits(q_TQD, keys, rules, index_BT, rows).view(batch, kv_heads, tokens, group, n)
    logits.masked_fill_(~seen[:, :, :, None], float("-inf"))
    highest = logits.amax(-1)
    weights = torch.softmax(logits, -1)
    blind = highest == float("-inf")
    if bool(blind.any()):
        weights.masked_fill_(blind[..., None], 0)  # where nothing is visible softmax gives NaN
    lse = highest - weights.amax(-1).log_().masked_fill_(blind, 0)  # the largest weight is exp(highest - lse)
    out = torch.bmm(weights.view(-1, tokens * group, n).to(q_TQD.dtype), keys.v_BHnD.view(-1, n, dim))
    out = out.view(batch, kv_heads, tokens, group, dim).permute(0, 2, 1, 3, 4).reshape(batch, tokens, -1, dim)
    mass = weights.sum((2, 3)) if want_mass else None
    return Attention(out, lse.permute(0, 2, 1, 3).reshape(batch, tokens, -1), mass)
