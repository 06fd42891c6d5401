"""Prefill of one sequence on an empty cache in plain torch: SDPA, or 64-query blocks when column mass is wanted."""

from __future__ import annotations

import torch
from torch import Tensor

from kvgate.kernels.types import Attention, Rules

_BLOCK = 64  # queries per block: logits of a block stay in the cache


def prefill(q_TQD: Tensor, k_THD: Tensor, v_THD: Tensor, rules: Rules, want_mass: bool) -> Attention:
    """Causal attention over the sequence's own tokens, block by block; logits, softmax and mass in fp32."""
    tokens, query_heads, dim = q_TQD.shape
    kv_heads = k_THD.shape[1]
    group = query_heads // kv_heads
    out = torch.empty_like(q_TQD)
    lse = torch.empty((tokens, query_heads), dtype=torch.float32, device=q_TQD.device)
    mass = torch.zeros((kv_heads, tokens), dtype=torch.float32, device=q_TQD.device) if want_mass else None
    k_HDT = k_THD.permute(1, 2, 0).float()
    v_HTD = v_THD.transpose(0, 1).contiguous()
    positions = torch.arange(tokens, device=q_TQD.device)
    for first in range(0, tokens, _BLOCK):
        last = min(tokens, first + _BLOCK)
        begin = 0 if rules.native_window is None else max(0, first - rules.native_window + 1)
        q = q_TQD[first:last].view(-1, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
        logits = torch.bmm(q.float() * rules.scale, k_HDT[:, :, begin:last])
        if rules.softcap is not None:
            logits = logits.div_(rules.softcap).tanh_().mul_(rules.softcap)
        back = positions[first:last, None] - positions[None, begin:last]
        hidden = back < 0 if rules.native_window is None else (back < 0) | (back >= rules.native_window)
        logits.view(kv_heads, group, last - first, -1).masked_fill_(hidden, float("-inf"))
        part = torch.logsumexp(logits, -1)
        weights = logits.sub_(part[..., None]).exp_()
        if mass is not None:
            mass[:, begin:last] += weights.sum(1)
        mixed = torch.bmm(weights.to(v_HTD.dtype), v_HTD[:, begin:last])
        out[first:last] = mixed.view(query_heads, last - first, dim).transpose(0, 1)
        lse[first:last] = part.view(query_heads, last - first).transpose(0, 1)
    return Attention(out, lse, mass)
