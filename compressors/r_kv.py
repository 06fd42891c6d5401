"""R-KV: important tokens that no later token repeats.

Source: Cai et al. 2025, "R-KV: Redundancy-aware KV Cache Compression for Reasoning Models", section 3: importance is
the attention of the last 8 queries, max-pooled over 7 positions; redundancy is the softmax over tokens of the mean
cosine similarity of a key to those of its head that it resembles by more than 0.5, the latest of them left out, so
that the newest of equal tokens survives; the score is ``mix`` * importance - (1 - mix) * redundancy, with 0.1 from
section 4.1 (0.07 in the authors' code). Eviction comes every ``buffer`` tokens (128 in the paper); the buffer is part
of the budget here and never more than a quarter of it, so that the budget holds at every step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvgate.compressors.attending import probabilities
from kvgate.compressors.evidence import Evidence, LastQueries, Need
from kvgate.compressors.policy import When
from kvgate.compressors.scored import Scored

WINDOW, POOL, ALIKE = 8, 7, 0.5


@dataclass(frozen=True)
class RKV(Scored):
    """Keeps the last 8 tokens, and of the others what is attended and not repeated."""

    name: ClassVar[str] = "r_kv"
    needs: ClassVar[frozenset[Need]] = frozenset({"keys", LastQueries(WINDOW)})
    when: When = "step"
    mix: float = 0.1
    buffer: int = 128

    def recent(self) -> int:
        return WINDOW

    def select(self, evidence: Evidence, scores: Tensor) -> Tensor:
        layers, heads, _ = evidence.live.shape
        if int(evidence.live.sum()) <= self.tokens * layers * heads:
            return evidence.live
        return super(RKV, replace(self, tokens=self.least)).select(evidence, scores)

    @property
    def least(self) -> int:
        """Tokens a head that an eviction leaves."""
        return self.tokens - min(self.buffer, self.tokens // 4)

    def score(self, evidence: Evidence) -> Tensor:
        assert evidence.keys is not None, "r_kv needs keys"
        keys = F.normalize(torch.where(evidence.live[..., None], evidence.keys(), 0).float(), dim=-1)
        order = torch.where(evidence.live, evidence.positions, torch.iinfo(torch.int32).max).argsort(-1)
        found = [
            self.mix * _pooled(attention.mean((1, 2)), order[layer])
            - (1 - self.mix) * _redundancy(keys[layer], evidence.live[layer], order[layer])
            for layer, attention in enumerate(probabilities(evidence))
        ]
        return torch.stack(found)


def _pooled(attention: Tensor, order: Tensor) -> Tensor:
    in_line = attention.gather(-1, order)
    return torch.zeros_like(attention).scatter(-1, order, F.max_pool1d(in_line, POOL, stride=1, padding=POOL // 2))


def _redundancy(keys: Tensor, live: Tensor, order: Tensor) -> Tensor:
    """fp32 ``[H, S]``, over live slots a distribution."""
    in_line = keys.gather(1, order[..., None].expand_as(keys))
    alike = in_line @ in_line.transpose(1, 2)
    alike.diagonal(dim1=1, dim2=2).zero_()
    alike = torch.where(alike > ALIKE, alike, 0.0)
    places = torch.arange(alike.shape[1], dtype=torch.int32, device=keys.device)[:, None]
    latest = torch.where(alike > 0, places, -1).amax(1)  # per column, the latest token like it
    alike = torch.where(places == latest[:, None], 0.0, alike)
    mean = torch.zeros_like(order, dtype=torch.float32).scatter(-1, order, alike.sum(2) / live.sum(-1, keepdim=True))
    return torch.softmax(mean.masked_fill(~live, -torch.inf), -1)
