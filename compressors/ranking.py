"""Ranking slots. Ties are broken by lower position, and no score can tie with a marker: keys are exact integers."""

from __future__ import annotations

import torch
from torch import Tensor

from kvgate.compressors.evidence import Evidence
from kvgate.compressors.policy import Shape

_LARGEST = torch.iinfo(torch.int64).max


def score_keys(scores: Tensor, positions: Tensor) -> Tensor:
    """int64 keys that order like (score, then lower position first), all different where positions are.

    Args:
        scores: fp32, any value; every NaN ranks above infinity, and -0.0 ties with 0.0.
        positions: int32, same shape, not negative.
    """
    plain = torch.where(scores.isnan(), torch.nan, scores + 0.0)  # one NaN of the many, one zero of the two
    bits = plain.view(torch.int32)
    monotone = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # two's complement order equals float order
    return (monotone.long() << 31) + (torch.iinfo(torch.int32).max - positions.long())


def keep_highest(keys: Tensor, eligible: Tensor, count: Tensor) -> Tensor:
    """The ``count`` ``[L, H]`` eligible slots with the highest key: bool ``[L, H, S]``, all of them if fewer.

    Works from the few that must go, so that a decode step which drops one slot costs one minimum.
    """
    drop = (eligible.sum(-1) - count.clamp_min(0)).clamp_min(0)
    most = int(drop.max())
    if most == 0:
        return eligible
    lowest = torch.where(eligible, keys, _LARGEST).topk(most, dim=-1, largest=False, sorted=True).values
    last_dropped = lowest.gather(-1, (drop - 1).clamp_min(0)[..., None])
    return eligible & ((keys > last_dropped) | (drop == 0)[..., None])


def keep_newest(evidence: Evidence, forced: Tensor, count: int) -> Tensor:
    """Bool ``[L, H, S]``: the ``forced`` live slots and, beside them, the ``count`` newest others."""
    others = evidence.live & ~forced
    counts = torch.full(others.shape[:2], count, device=others.device)
    return forced | keep_highest(evidence.positions.long(), others, counts)


def keep_highest_together(keys: Tensor, eligible: Tensor, beside: Tensor, most: int, shape: Shape) -> Tensor:
    """The eligible slots with the highest key among heads that share a budget: bool ``[L, H, S]``.

    Args:
        keys: all different within a group of heads. ``beside``: slots that stay anyway and count.
        most: slots of a group, ``beside`` included. ``shape``: whether a group is a layer or the model.
    """
    layers, heads, slots = keys.shape
    groups = (layers, 1, heads * slots) if shape == "layer" else (1, 1, layers * heads * slots)
    room = most - beside.reshape(groups).sum(-1)
    return keep_highest(keys.reshape(groups), eligible.reshape(groups), room).reshape(keys.shape)
