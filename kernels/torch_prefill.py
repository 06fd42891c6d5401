"""Prefill of one sequence on an empty cache in plain torch: SDPA, or blocks of queries when column mass is wanted."""

from __future__ import annotations

import torch
from torch import Tensor

from kvgate.kernels.types import Attention, Rules

_BLOCK = 64  # queries whose logits stay in the cache
_FADED = 1e-20  # a weight too small to recover the log-sum-exp from


def prefill(q_TQD: Tensor, k_THD: Tensor, v_THD: Tensor, rules: Rules, want_mass: bool) -> Attention:
    """Causal attention over the sequence's own tokens."""
    if is_flash(q_TQD, rules, want_mass):
        return _flash(q_TQD, k_THD, v_THD, rules.scale)
    if rules.native_window is not None and rules.native_window >= q_TQD.shape[0]:
        rules = Rules(rules.scale, softcap=rules.softcap)
    return _blocks(q_TQD, k_THD, v_THD, rules, want_mass)


def is_flash(q_TQD: Tensor, rules: Rules, want_mass: bool) -> bool:
    """Whether plain SDPA does: no mass, no soft cap and no window that hides anything."""
    tokens = q_TQD.shape[0]
    open_window = rules.native_window is None or rules.native_window >= tokens
    plain = rules.softcap is None and open_window and q_TQD.device.type == "cpu"
    return plain and tokens > 0 and not want_mass


def _flash(q_TQD: Tensor, k_THD: Tensor, v_THD: Tensor, scale: float) -> Attention:
    """torch's own CPU flash attention, the operator below SDPA, since SDPA does not give the log-sum-exp."""
    group = q_TQD.shape[1] // k_THD.shape[1]
    q = q_TQD.transpose(0, 1)[None]
    k, v = (x.transpose(0, 1)[:, None].expand(-1, group, -1, -1).flatten(0, 1)[None] for x in (k_THD, v_THD))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
    return Attention(out[0].transpose(0, 1).contiguous(), lse[0].float().t().contiguous(), None)


def _blocks(q_TQD: Tensor, k_THD: Tensor, v_THD: Tensor, rules: Rules, want_mass: bool) -> Attention:
    """Block by block with a full-row softmax; logits, softmax and mass in fp32."""
    tokens, query_heads, dim = q_TQD.shape
    kv_heads = k_THD.shape[1]
    group = query_heads // kv_heads
    out = torch.empty_like(q_TQD, memory_format=torch.contiguous_format)
    lse = torch.empty((tokens, query_heads), dtype=torch.float32, device=q_TQD.device)
    mass = torch.zeros((kv_heads, tokens), dtype=torch.float32, device=q_TQD.device) if want_mass else None
    k_HDT = k_THD.permute(1, 2, 0).float()
    v_HTD = v_THD.transpose(0, 1).contiguous()
    room = torch.empty((2, query_heads * _BLOCK * tokens), dtype=torch.float32, device=q_TQD.device)
    for first in range(0, tokens, _BLOCK):
        last = min(tokens, first + _BLOCK)
        begin = 0 if rules.native_window is None else max(0, first - rules.native_window + 1)
        shape = (kv_heads, group * (last - first), last - begin)
        size = shape[0] * shape[1] * shape[2]
        q = q_TQD[first:last].view(-1, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
        logits = torch.bmm(q.float() * rules.scale, k_HDT[:, :, begin:last], out=room[0, :size].view(shape))
        if rules.softcap is not None:
            logits.div_(rules.softcap).tanh_().mul_(rules.softcap)
        rows = logits.view(query_heads, last - first, -1)
        _hide(rows, first - begin, rules.native_window)
        weights = torch.softmax(logits, -1, out=room[1, :size].view(shape))
        sums = _log_sum(logits, weights, first - begin, last - first).view(query_heads, -1)
        if mass is not None:
            mass[:, begin:last] += weights.sum(1)
        mixed = torch.bmm(weights.to(v_HTD.dtype), v_HTD[:, begin:last])
        out[first:last] = mixed.view(query_heads, last - first, dim).transpose(0, 1)
        lse[first:last] = sums.t()
    return Attention(out, lse, mass)


def _hide(logits_QTn: Tensor, own: int, window: int | None) -> None:
    """-inf where a query may not look; the block's own tokens start at column `own`."""
    block = logits_QTn.shape[1]
    later = torch.ones((block, block), dtype=torch.bool, device=logits_QTn.device).triu_(1)
    logits_QTn[:, :, own:].masked_fill_(later, float("-inf"))
    if window is not None:
        t = torch.arange(block, device=logits_QTn.device)[:, None] + own
        far = t - torch.arange(logits_QTn.shape[2], device=logits_QTn.device) >= window
        logits_QTn.masked_fill_(far, float("-inf"))


def _log_sum(logits: Tensor, weights: Tensor, own: int, block: int) -> Tensor:
    """Log-sum-exp of each row from its own token's logit and weight, which every query sees: no pass over the rows."""
    heads, rows, _ = logits.shape
    at = (torch.arange(rows, device=logits.device) % block + own).expand(heads, rows)[..., None]
    logit, weight = logits.gather(2, at), weights.gather(2, at)
    if bool((weight < _FADED).any()):
        logit, weight = logits.amax(2, keepdim=True), weights.amax(2, keepdim=True)
    return logit - weight.log()
