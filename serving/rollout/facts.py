"""What every rollout tool is told, taken from a canary config once."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from kvgate.evals.leaderboard.rollout import Limits, Stage
from kvgate.serving.canary.settings import Canary


@dataclass(frozen=True)
class Facts:
    """Of one canary.

    Attributes:
        name: a DNS label for resources. label: of the policy, as the metrics carry it.
        margin: accepted loss. stages: traffic and pairs. limits: guards. first: share that flags begin with.
        shadow_only: no traffic may ever be sent.
    """

    name: str
    label: str
    margin: float
    stages: tuple[Stage, ...]
    limits: Limits
    first: float
    shadow_only: bool

    @classmethod
    def of(cls, canary: Canary) -> Facts:
        """Of a parsed canary config."""
        name = re.sub(r"[^a-z0-9]+", "-", f"kvgate-{canary.label}".lower()).strip("-")[:53]
        rollout, judge = canary.judge.rollout, canary.judge
        return cls(
            name, canary.label, judge.margin, rollout.stages, rollout.limits, canary.first_traffic, judge.shadow_only
        )

    @property
    def selector(self) -> str:
        """PromQL label matcher of the policy."""
        return f'{{policy="{self.label}"}}'

    @property
    def guards(self) -> list[tuple[str, float]]:
        """Names and limits."""
        return [(each.name, getattr(self.limits, each.name)) for each in fields(self.limits)]
