"""Whole pages: heads that share a budget hand slots to each other until their last pages are full.

Memory is freed by the page. Counts that follow scores alone leave half a page of every head empty on average, which for
short contexts is a good part of what was saved.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvgate.compressors.policy import Shape


def whole_pages(kept: Tensor, least: Tensor, most: Tensor, page: int, shape: Shape) -> Tensor:
    """How many slots each head keeps: int64 ``[L, H]``, in each group as many as ``kept`` together.

    Each head gives up its last page if that is not full, and the slots so freed fill those pages that lacked least; the
    last few begin one page more.

    Args:
        kept: int64 ``[L, H]``, slots a head would keep. ``least``: those that must stay. ``most``: those there are.
        page: slots of a page. ``shape``: whether a layer's heads or all heads share a budget.
    """
    down = torch.maximum(kept // page * page, least)
    cost = torch.minimum((down // page + 1) * page, most) - down
    groups = kept.shape if shape == "layer" else (1, kept.numel())
    spare = (kept - down).reshape(groups)
    order = torch.where(cost > 0, kept - down, -1).reshape(groups).argsort(dim=-1, descending=True, stable=True)
    wanted = cost.reshape(groups).gather(-1, order)
    left = spare.sum(-1, keepdim=True) - (wanted.cumsum(-1) - wanted)  # when a head's turn comes
    given = torch.minimum(wanted, left.clamp_min(0))
    return down + torch.zeros_like(spare).scatter(-1, order, given).reshape(kept.shape)
