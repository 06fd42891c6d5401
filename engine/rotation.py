"""Rotary embedding as a function: turns keys or queries of a layer by any number of positions, forth or back."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from kvgate.engine.models import ModelInfo
from kvgate.engine.rebase import find_rotary


class Rotation:
    """``rotation(x, by, layer)``: fp32 ``x`` ``[..., T, D]`` turned by int64 ``by`` ``[T]`` positions.

    Rotations add up (Su et al. 2021, "RoFormer", section 3.2), so turning a rotated key back by its position gives the
    key before rotation. Scaling that some variants put into cos and sin is left in the states.
    """

    def __init__(self, module: Any, info: ModelInfo) -> None:
        self._module = module
        self._info = info
        kinds = getattr(module.config.get_text_config(), "layer_types", None)
        self._kinds: tuple[str, ...] | None = tuple(kinds) if kinds else None

    def __call__(self, x: Tensor, by: Tensor, layer: int) -> Tensor:
        """See the class. ValueError where this model's rotation is not known to turn halves."""
        if not self._info.rotates_halves:
            raise ValueError(
                f"model {self._info.name!r} ({self._info.model_type}): kvgate cannot turn its rotary embedding; "
                "use a policy that needs nothing from before the rotation"
            )
        cos, sin = self._angles(by, layer, x)
        width = cos.shape[-1]
        turned, rest = x[..., :width], x[..., width:]
        first, second = turned.chunk(2, dim=-1)
        turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
        return torch.cat((turned, rest), dim=-1)

    def _angles(self, by: Tensor, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        rotary = find_rotary(self._module)
        takes_type = "layer_type" in inspect.signature(rotary.forward).parameters
        extra = {"layer_type": self._kinds[layer]} if takes_type and self._kinds else {}
        cos, sin = rotary(like.float(), by[None], **extra)
        scale = (cos[0].square() + sin[0].square()).sqrt()
        return cos[0] / scale, sin[0] / scale
