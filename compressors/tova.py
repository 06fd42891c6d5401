"""TOVA: what the newest token attends stays.

Source: Oren et al. 2024 (EMNLP), "Transformers are Multi-State RNNs", section 3.2: at every step the token with the
lowest attention from the newest query goes, the attention averaged over all heads of the layer. No parameters. The
newest token stays in any case, as in kvpress; the paper does not force it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvgate.compressors.attending import probabilities
from kvgate.compressors.evidence import Evidence, LastQueries, Need
from kvgate.compressors.policy import When
from kvgate.compressors.scored import Scored


@dataclass(frozen=True)
class TOVA(Scored):
    """Keeps the tokens with the highest attention from the newest one."""

    name: ClassVar[str] = "tova"
    needs: ClassVar[frozenset[Need]] = frozenset({"keys", LastQueries(1)})
    when: When = "step"

    def recent(self) -> int:
        return 1

    def score(self, evidence: Evidence) -> Tensor:
        where = torch.where(evidence.live, evidence.positions, evidence.length).long()
        found = torch.zeros(evidence.live.shape, device=where.device)
        for layer, attention in enumerate(probabilities(evidence)):
            heads, group = attention.shape[:2]
            by_token = found.new_zeros(evidence.length + 1)
            by_token.index_add_(0, where[layer].flatten(), attention.sum((1, 2)).flatten() / (heads * group))
            found[layer] = by_token[where[layer]]
        return found
