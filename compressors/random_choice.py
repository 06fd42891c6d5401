"""Random eviction: the control. A policy that is no better than this one measures nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvgate.compressors.evidence import Evidence
from kvgate.compressors.scored import Scored


@dataclass(frozen=True)
class RandomChoice(Scored):
    """Keeps tokens drawn by ``seed``, for each head its own."""

    name: ClassVar[str] = "random"
    seed: int = 0

    def score(self, evidence: Evidence) -> Tensor:
        draw = torch.Generator().manual_seed(self.seed)
        by_position = torch.rand(*evidence.live.shape[:2], evidence.length, generator=draw)
        where = torch.where(evidence.live, evidence.positions, 0).long()
        return by_position.to(where.device).gather(-1, where)
