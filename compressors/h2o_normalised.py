"""H2O with normalised sums: attention mass per query that could have given any.

Source: Zhang et al. 2023 as in :mod:`kvgate.compressors.h2o`. Sums favour old tokens, since more queries see them;
dividing by the number of those is what Oren et al. 2024 ("Transformers are Multi-State RNNs", section 3.2) compare as
H2O's bias, and kvpress's ObservedAttention does it (without a recent window).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvgate.compressors.evidence import Evidence
from kvgate.compressors.h2o import H2O


@dataclass(frozen=True)
class H2ONormalised(H2O):
    """Keeps the last ``recent`` tokens and the ``heavy`` others with the most attention mass per token of age."""

    name: ClassVar[str] = "h2o_normalised"

    def weight(self, evidence: Evidence) -> Tensor:
        return super().weight(evidence) / evidence.age.clamp_min(1)
