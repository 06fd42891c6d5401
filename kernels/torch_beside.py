"""Attention of new tokens over cached ones and themselves, on contiguous tensors: two flash calls and their join."""

from __future__ import annotations

import torch
from torch import Tensor

from kvgate.kernels.types import Attention


def beside(
    q_TQD: Tensor, k_old_HSD: Tensor, v_old_HSD: Tensor, k_THD: Tensor, v_THD: Tensor, *, scale: float
) -> Attention:
    """Every query sees all S old tokens, and of the T new ones those up to itself. CPU only; no mass.

    softmax over two sets is the mean of their outputs weighted by exp(lse) (Dao et al. 2023, "FlashAttention-2",
    section 2.3). The outputs are joined in fp32.
    """
    q = q_TQD.transpose(0, 1)[None]
    group = q_TQD.shape[1] // k_THD.shape[1]

    def spread(x_HnD: Tensor) -> Tensor:
        return x_HnD[:, None].expand(-1, group, -1, -1).flatten(0, 1)[None]

    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    old, old_lse = flash(q, spread(k_old_HSD), spread(v_old_HSD), 0.0, False, scale=scale)
    new, new_lse = flash(q, spread(k_THD.transpose(0, 1)), spread(v_THD.transpose(0, 1)), 0.0, True, scale=scale)
    lse = torch.logaddexp(old_lse.float(), new_lse.float())
    share = (old_lse.float() - lse).exp()[..., None]
    out = torch.lerp(new.float(), old.float(), share).to(q_TQD.dtype)
    return Attention(out[0].transpose(0, 1).contiguous(), lse[0].t().contiguous(), None)
