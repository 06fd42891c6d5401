"""Turns rotated queries back, for StreamingLLM with positions counted inside the cache.

Keys stay as they were rotated. A query that should see the sinks ``d`` tokens closer is rotated back by ``d``: rotary
embeddings depend on distances only (Su et al. 2021, "RoFormer", section 3.2), so R(p - d) q . R(k) k' is the dot
product at distance p - d - k.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn


class Rebase:
    """cos and sin of ``-shift`` for each query token and kind of layer, computed once a step.

    Args:
        rotary: the model's rotary embedding module.
        shift_T: int64 ``[T]``, positions to turn each query back by.
        like: any tensor of the model's dtype and device.
    """

    def __init__(self, rotary: nn.Module, shift_T: Tensor, like: Tensor) -> None:
        self._rotary = rotary
        self._positions = -shift_T[None]
        self._like = like.float()
        self._made: dict[str | None, tuple[Tensor, Tensor]] = {}

    def __call__(self, q_TQD: Tensor, layer_type: str | None) -> Tensor:
        """Queries ``[T, Q, D]`` rotated back; dimensions without rotary embedding pass through."""
        cos, sin = self._turn(layer_type)
        width = cos.shape[-1]
        turned, rest = q_TQD[..., :width].float(), q_TQD[..., width:]
        first, second = turned.chunk(2, dim=-1)
        turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
        return torch.cat((turned.to(q_TQD.dtype), rest), dim=-1)

    def _turn(self, layer_type: str | None) -> tuple[Tensor, Tensor]:
        if layer_type not in self._made:
            takes_type = "layer_type" in inspect.signature(self._rotary.forward).parameters
            extra = {"layer_type": layer_type} if takes_type else {}
            cos, sin = self._rotary(self._like, self._positions, **extra)
            scale = (cos[0].square() + sin[0].square()).sqrt()[:, None]  # some variants scale both: only turn here
            self._made[layer_type] = (cos[0][:, None] / scale, sin[0][:, None] / scale)
        return self._made[layer_type]


def find_rotary(module: Any) -> nn.Module:
    """The model's rotary embedding. ValueError if it has none."""
    for name, part in module.named_modules():
        if name.endswith("rotary_emb"):
            found: nn.Module = part
            return found
    raise ValueError("positions: rebased needs a model with rotary embeddings; use positions: original")
