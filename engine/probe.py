"""What a model's layers do with attention, seen from what they call, not from what the configuration says."""

from __future__ import annotations

from dataclasses import dataclass, field
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor

from kvgate.engine.attention import call_model

_TOKENS = 2


@dataclass(frozen=True)
class AttentionShape:
    """The same for every layer but the window.

    Attributes:
        windows: per layer, how many newest tokens it attends (its own included), None for all of them.
    """

    windows: tuple[int | None, ...]
    query_heads: int
    kv_heads: int
    head_dim: int


@dataclass
class _Layer:
    writes: int = 0
    calls: int = 0
    window: int | None = None
    shapes: set[tuple[int, int, int, int, int]] = field(default_factory=set)


class Probe:
    """Stands in for a step: notes each layer's writes and calls, and answers with the values."""

    def __init__(self, device: torch.device) -> None:
        self.position_T = torch.arange(_TOKENS, dtype=torch.int32, device=device)
        self.layers: dict[int, _Layer] = {}

    def write(self, key: Tensor, value: Tensor, layer: int) -> None:
        """Keys and values ``[1, H, T, D]`` that would be cached."""
        seen = self.layers.setdefault(layer, _Layer())
        seen.writes += 1
        seen.shapes.add((0, key.shape[1], value.shape[1], key.shape[3], value.shape[3]))

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer: int,
        scale: float,
        softcap: float | None,
        window: int | None,
    ) -> Tensor:
        """Values of the right shape ``[1, T, Q, D]``."""
        seen = self.layers.setdefault(layer, _Layer())
        seen.calls += 1
        seen.window = window
        seen.shapes.add((query.shape[1], key.shape[1], value.shape[1], key.shape[3], value.shape[3]))
        repeat = -(-query.shape[1] // value.shape[1])
        return value.repeat_interleave(repeat, 1)[:, : query.shape[1]].transpose(1, 2).contiguous()


@torch.inference_mode()
def attention_shape(module: Any, name: str) -> AttentionShape:
    """Run two tokens through ``module``. ValueError, one line, if any layer does what pages per head cannot hold."""
    device = next(module.parameters()).device
    probe = Probe(device)
    try:
        call_model(module, list(range(_TOKENS)), probe, torch.arange(_TOKENS), device)
    except Exception as error:  # whatever a model does with a cache that is not its own
        raise ValueError(_refusal(module, name, f"cannot run on pages: {one_line(error)}")) from error
    layers = module.config.get_text_config().num_hidden_layers
    reason = _reason(probe.layers, layers)
    if reason:
        raise ValueError(_refusal(module, name, reason))
    query_heads, kv_heads, _, head_dim, _ = next(shape for shape in probe.layers[0].shapes if shape[0])
    return AttentionShape(tuple(probe.layers[layer].window for layer in range(layers)), query_heads, kv_heads, head_dim)


def one_line(error: BaseException) -> str:
    """Kind and message of an error."""
    message = shorten(" ".join(str(error).split()), 200)
    return message if isinstance(error, ValueError) and message else f"{type(error).__name__}: {message}"


def _reason(seen: dict[int, _Layer], layers: int) -> str | None:
    if missing := [layer for layer in range(layers) if layer not in seen or not seen[layer].calls]:
        return f"layers {_some(missing)} of {layers} keep their memory elsewhere than in attention over keys and values"
    if len(seen) > layers:
        return f"attends in {len(seen)} layers where its configuration has {layers}"
    for layer, what in seen.items():
        if (what.writes, what.calls) != (1, 1):
            return f"layer {layer} caches {what.writes} times and attends {what.calls} times for each token, not once"
    shapes = {shape[1:] for what in seen.values() for shape in what.shapes}
    queries = {shape[0] for what in seen.values() for shape in what.shapes if shape[0]}
    if len(shapes) > 1 or len(queries) > 1:
        kinds = " or ".join(f"{keys} of {key_dim}" for keys, _, key_dim, _ in sorted(shapes))
        return f"number or size of heads differs between layers, or between cached and attended ({kinds})"
    key_heads, value_heads, key_dim, value_dim = shapes.pop()
    if key_heads != value_heads or key_dim != value_dim:
        return f"keys and values differ in shape: {key_heads} heads of {key_dim}, {value_heads} of {value_dim}"
    return None if queries.pop() % key_heads == 0 else "query heads are no multiple of key heads"


def _some(layers: list[int]) -> str:
    return ", ".join(map(str, layers[:4])) + (" ..." if len(layers) > 4 else "")


def _refusal(module: Any, name: str, reason: str) -> str:
    serves = "kvgate serves decoder-only models with plain or grouped-query attention"
    return f"model {name!r} ({module.config.get_text_config().model_type}): {reason}; {serves}"
