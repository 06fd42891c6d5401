"""KeyDiff: keys unlike the others stay.

Source: Park et al. 2025, "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in Resource-
Constrained Environments", section 3.2: the score is the negative cosine similarity to the anchor, the mean of the
normalised keys of the head. No parameters. The paper evicts block by block during prefill; here the whole prompt is
scored at once, as kvpress does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvgate.compressors.evidence import Evidence, Need
from kvgate.compressors.scored import Scored


@dataclass(frozen=True)
class KeyDiff(Scored):
    """Keeps the keys that differ most from their head's mean direction."""

    name: ClassVar[str] = "keydiff"
    needs: ClassVar[frozenset[Need]] = frozenset({"keys"})

    def score(self, evidence: Evidence) -> Tensor:
        assert evidence.keys is not None, "keydiff needs keys"
        live = evidence.live[..., None]
        direction = F.normalize(torch.where(live, evidence.keys(), 0).float(), dim=-1)
        anchor = direction.sum(-2, keepdim=True) / live.sum(-2, keepdim=True).clamp_min(1)
        return -F.cosine_similarity(direction, anchor, dim=-1)
