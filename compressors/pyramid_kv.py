"""PyramidKV: SnapKV's scores, with more of the budget in the lower layers.

Source: Cai et al. 2024, "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling", section
4.2: beside the window, layer budgets fall on a line whose last is a ``beta``-th of the mean; beta is 20 in the
authors' code and kvpress. Their integer steps may add up to more than the budget; here the layers' shares are rounded
so that they never do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvgate.compressors.evidence import Evidence
from kvgate.compressors.policy import Shape
from kvgate.compressors.ranking import keep_highest, score_keys
from kvgate.compressors.snapkv import SnapKV


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """Keeps what SnapKV would, heads of a layer alike, layers by a falling line."""

    name: ClassVar[str] = "pyramid_kv"
    shape: Shape = "model"
    beta: int = 20

    def select(self, evidence: Evidence, scores: Tensor) -> Tensor:
        forced = self.forced(evidence)
        room = self.layer_budgets(evidence.live.shape[0], evidence.length)[:, None] - forced.sum(-1)
        return forced | keep_highest(score_keys(scores, evidence.positions), evidence.live & ~forced, room)

    def layer_budgets(self, layers: int, length: int) -> Tensor:
        """int64 ``[layers]``, tokens a head; they add up to no more than ``layers * tokens``."""
        always = min(self.window, self.tokens)
        mean = self.tokens - always
        last = mean / self.beta
        first = min(2 * mean - last, length - always)
        line = torch.linspace(first, max(2 * mean - first, 0), layers, dtype=torch.float64) if layers > 1 else None
        ends = (torch.tensor([float(mean)]) if line is None else line).cumsum(0).add(1e-6).floor().long()
        return torch.diff(ends, prepend=ends.new_zeros(1)) + always
