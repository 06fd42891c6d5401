"""Attention of given queries over the slots, for scores. fp32 throughout; one layer at a time, to stay in memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvgate.compressors.evidence import Evidence, Model, Observed

_BLOCK = 256  # query rows at once: their logits stay in the processor's cache


def model_of(evidence: Evidence) -> Model:
    """The model's constants, which the engine always supplies."""
    assert evidence.model is not None, "evidence without a model"
    return evidence.model


def peaks(observed: Observed, evidence: Evidence) -> Tensor:
    """fp32 ``[L, H, S]``: the largest attention probability that any query of the probe gives each slot."""
    assert evidence.keys is not None, "peaks need keys"
    keys = evidence.keys()
    found = [
        _peaks(observed.queries[layer], observed.lse[layer], observed.first, keys[layer], evidence, layer)
        for layer in range(len(keys))
    ]
    return torch.where(evidence.live, torch.stack(found).exp(), 0.0)


def _peaks(queries: Tensor, lse: Tensor, first: int, keys: Tensor, evidence: Evidence, layer: int) -> Tensor:
    heads = keys.shape[0]
    rows = queries.reshape(heads, -1, queries.shape[-1]).float()
    rest = lse.reshape(heads, -1, 1).float()
    where = torch.arange(first, first + queries.shape[1], device=keys.device).repeat(queries.shape[0] // heads)
    best = torch.full(keys.shape[:2], -torch.inf, device=keys.device)
    columns = _columns(keys)
    for start in range(0, rows.shape[1], _BLOCK):
        block = slice(start, start + _BLOCK)
        logits = logits_of(rows[:, block], columns, model_of(evidence)) - rest[:, block]
        window = model_of(evidence).windows[layer]
        if window is not None:
            far = where[block, None] - evidence.positions[layer][:, None] >= window
            logits = logits.masked_fill(far, -torch.inf)
        best = torch.maximum(best, logits.amax(1))
    return best


def logits_of(rows: Tensor, columns: Tensor, model: Model) -> Tensor:
    """``[H, N, S]`` logits of fp32 ``rows`` ``[H, N, D]`` against ``columns`` ``[H, D, S]``."""
    logits = (rows * model.scale) @ columns
    return logits if model.softcap is None else model.softcap * torch.tanh(logits / model.softcap)


def probabilities(evidence: Evidence) -> Iterator[Tensor]:
    """Layer by layer, fp32 ``[H, G, W, S]``: what the last W queries give each live slot, each as if it came last:
    softmax over the slots up to it that the layer attends. Zero elsewhere.
    """
    assert evidence.keys is not None, "attention needs keys"
    assert evidence.queries is not None, "attention needs queries"
    keys = evidence.keys()
    for layer, queries in enumerate(evidence.queries):
        heads, (query_heads, count, dim) = keys.shape[1], queries.shape
        live, positions = evidence.live[layer], evidence.positions[layer]
        logits = logits_of(queries.reshape(heads, -1, dim).float(), _columns(keys[layer]), model_of(evidence))
        logits = logits.reshape(heads, query_heads // heads, count, -1)
        where = torch.arange(evidence.length - count, evidence.length, device=positions.device)[:, None]
        seen = live[:, None] & (positions[:, None] <= where)
        window = model_of(evidence).windows[layer]
        if window is not None:
            seen = seen & (where - positions[:, None] < window)
        found = torch.softmax(logits.masked_fill(~seen[:, None], -torch.inf), dim=-1)
        yield torch.nan_to_num(found)  # a query that sees nothing that is left


def _columns(keys: Tensor) -> Tensor:
    """fp32 ``[H, D, S]``. Dead slots may hold anything: their logits are theirs alone, and nobody reads them."""
    return keys.float().transpose(1, 2)
