"""Linear layers whose result for a token does not depend on how many tokens are fed at once.

A matrix product picks its blocking, and with it the order of its sums, by the number of rows: in bf16 on CPUs with AMX
a row's result differs between products of up to 32 rows and of more. Here every product has the same number of rows:
tokens are cut into tiles and the last tile is filled up with zeros. In bf16 on CPUs weights are packed once for that
tile, which makes decode faster than plain products are; the packed copy takes as much memory as the weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# Rows of a tile, measured on embedded-size layers: wide enough for prefill, still cheap where one row is decoded.
_HALF, _HALF_HEAD, _FULL = 64, 16, 16
_MOST_PACKED = 4 << 30  # bytes of weights; bigger models are tiled without a packed copy


class Tiled(nn.Module):
    """A linear layer over tiles of ``rows`` tokens.

    Args:
        plain: the layer it stands for (``nn.Linear`` or GPT-2's ``Conv1D``); its parameters are shared, not copied.
        rows: tokens of a tile. ``pack``: keep the weights in the layout of the CPU's bf16 product too.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, plain: Any, rows: int, pack: bool) -> None:
        super().__init__()
        self.weight, self.bias = plain.weight, plain.bias
        self.rows, self.pack = rows, pack
        self.transposed = not isinstance(plain, nn.Linear)
        self._packed: tuple[object, Tensor] | None = None

    @property
    def in_features(self) -> int:
        """Width of the input."""
        return int(self.weight.shape[0 if self.transposed else 1])

    @property
    def out_features(self) -> int:
        """Width of the output."""
        return int(self.weight.shape[1 if self.transposed else 0])

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]``."""
        flat = x.reshape(-1, x.shape[-1])
        tiles = -(-flat.shape[0] // self.rows)
        padded = nn.functional.pad(flat, (0, 0, 0, tiles * self.rows - flat.shape[0]))
        out = x.new_empty(padded.shape[0], self.out_features)
        for start in range(0, padded.shape[0], self.rows):
            out[start : start + self.rows] = self._tile(padded[start : start + self.rows])
        return out[: flat.shape[0]].view(*x.shape[:-1], self.out_features)

    def _tile(self, x: Tensor) -> Tensor:
        if self.pack and x.dtype == torch.bfloat16 and not x.is_cuda:
            found: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed_weight(), self.bias, "none", [], "")
            return found
        return nn.functional.linear(x, self.weight.t() if self.transposed else self.weight, self.bias)

    def _packed_weight(self) -> Tensor:
        key = (self.weight.data_ptr(), self.weight.dtype, self.weight._version)
        if self._packed is None or self._packed[0] != key:
            weight = (self.weight.t() if self.transposed else self.weight).detach().contiguous()
            self._packed = key, torch.ops.mkldnn._reorder_linear_weight(weight, self.rows)
        return self._packed[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": None}  # opaque to copies, and made again when needed


def tile_linears(module: Any) -> None:
    """Put :class:`Tiled` in the place of every plain linear layer of ``module``."""
    from transformers.pytorch_utils import Conv1D

    head = module.get_output_embeddings()
    found = [(name, part) for name, part in module.named_modules() if type(part) in (nn.Linear, Conv1D)]
    size = sum(part.weight.numel() * part.weight.element_size() for _, part in found)
    pack = size <= _MOST_PACKED and can_pack()
    for name, part in found:
        half = part.weight.dtype != torch.float32
        rows = (_HALF_HEAD if part is head else _HALF) if half else _FULL
        module.set_submodule(name, Tiled(part, rows, pack))


def can_pack() -> bool:
    """Whether this build of torch has the packed bf16 product."""
    backend = getattr(torch.backends, "mkldnn", None)
    has = hasattr(torch.ops.mkldnn, "_linear_pointwise") and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    return bool(backend and backend.is_available() and has and torch.ops.mkldnn._is_mkldnn_bf16_supported())
