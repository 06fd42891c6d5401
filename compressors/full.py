"""The exact run: everything stays."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from kvgate.compressors.evidence import Evidence, Keep
from kvgate.compressors.policy import Policy


@dataclass(frozen=True)
class Full(Policy):
    """Full KV."""

    name: ClassVar[str] = "full"

    @classmethod
    def for_budget(cls, budget: int, **params: Any) -> Self:
        raise ValueError("policy full: takes no budget")

    @property
    def budget(self) -> int:
        return sys.maxsize

    def decide(self, evidence: Evidence) -> Keep:
        return Keep.all(evidence)
