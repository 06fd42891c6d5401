"""SnapKV: what the last tokens of the prompt attend stays, with its neighbours.

Source: Li et al. 2024 (NeurIPS), "SnapKV: LLM Knows What You are Looking for Before Generation", section 4 and
listing 1. Defaults are those of the authors' code and of kvpress: a window of 64, mean pooling over 5 (the paper's
experiments use windows of 16 to 32 and max pooling over 5 to 7).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvgate.compressors.attending import probabilities
from kvgate.compressors.evidence import Evidence, LastQueries, Need
from kvgate.compressors.scored import Scored


@dataclass(frozen=True)
class SnapKV(Scored):
    """Keeps the last ``window`` tokens, and what they attend on average, smoothed over ``kernel`` positions."""

    name: ClassVar[str] = "snapkv"
    window: int = 64
    kernel: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1 or self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"policy {self.name}: window {self.window}, kernel {self.kernel}: from 1 on, kernel odd")

    @property
    def needs(self) -> frozenset[Need]:  # type: ignore[override]
        return frozenset({"keys", LastQueries(self.window)})

    def recent(self) -> int:
        return self.window

    def score(self, evidence: Evidence) -> Tensor:
        observed = evidence.live & (evidence.age <= self.window)
        found = [attention.mean((1, 2)) for attention in probabilities(evidence)]
        return smoothed(torch.where(observed, 0.0, torch.stack(found)), evidence, self.kernel)


def smoothed(scores: Tensor, evidence: Evidence, kernel: int) -> Tensor:
    """Means over ``kernel`` neighbouring live tokens, zero beyond both ends: fp32 ``[L, H, S]``, zero in dead slots."""
    order = torch.where(evidence.live, evidence.positions, torch.iinfo(torch.int32).max).argsort(-1)
    in_line = torch.where(evidence.live, scores, 0.0).gather(-1, order)
    pooled = F.avg_pool1d(in_line, kernel, stride=1, padding=kernel // 2)
    return torch.zeros_like(scores).scatter(-1, order, pooled)
