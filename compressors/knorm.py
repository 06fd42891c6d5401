"""Knorm: keys of small norm stay.

Source: Devoto et al. 2024 (EMNLP), "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression", section 4:
keys of low norm get high attention. No parameters. The paper leaves the first two layers whole; kvpress does not, nor
does this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvgate.compressors.evidence import Evidence, Need
from kvgate.compressors.scored import Scored


@dataclass(frozen=True)
class Knorm(Scored):
    """Keeps the keys with the smallest L2 norm."""

    name: ClassVar[str] = "knorm"
    needs: ClassVar[frozenset[Need]] = frozenset({"keys"})

    def score(self, evidence: Evidence) -> Tensor:
        assert evidence.keys is not None, "knorm needs keys"
        norms: Tensor = torch.linalg.vector_norm(
            torch.where(evidence.live[..., None], evidence.keys(), 0).float(), dim=-1
        )
        return -norms
