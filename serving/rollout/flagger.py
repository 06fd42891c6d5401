"""Flagger: MetricTemplates and a Canary. Flagger knows pass and fail only: it cannot pause on missing data."""

from __future__ import annotations

from typing import Any

from kvgate.serving.rollout.argo import PROMETHEUS
from kvgate.serving.rollout.facts import Facts

WARNING = (
    "Flagger cannot pause on missing data: a metric without a value counts as a failed check, and after `threshold`\n"
    "of them it rolls back. Shadow first with `kvgate serve --canary`, so that there are data before traffic moves."
)


def manifests(facts: Facts) -> list[dict[str, Any]]:
    """In the order in which they are applied. ValueError for a verdict that allows shadows only."""
    if facts.shadow_only:
        raise ValueError("flagger: this verdict allows shadows only; `kvgate serve --canary` carries them out")
    # The lower limit of the loss: a check fails where a loss is proved.
    loss = f"max(-kvgate_canary_quality_difference_upper{facts.selector})"
    templates = [_template(f"{facts.name}-quality-loss", loss)]
    metrics = [_metric("quality-loss", f"{facts.name}-quality-loss", facts.margin)]
    for name, limit in facts.guards:
        dashed = name.replace("_", "-")
        query = f'max(kvgate_canary_guard_difference_lower{{policy="{facts.label}",guard="{name}"}})'
        templates.append(_template(f"{facts.name}-{dashed}", query))
        metrics.append(_metric(dashed, f"{facts.name}-{dashed}", limit))
    return [*templates, _canary(facts, metrics)]


def _template(name: str, query: str) -> dict[str, Any]:
    return {
        "apiVersion": "flagger.app/v1beta1",
        "kind": "MetricTemplate",
        "metadata": {"name": name},
        "spec": {"provider": {"type": "prometheus", "address": PROMETHEUS}, "query": query},
    }


def _metric(name: str, template: str, most: float) -> dict[str, Any]:
    return {"name": name, "templateRef": {"name": template}, "thresholdRange": {"max": most}, "interval": "1m"}


def _canary(facts: Facts, metrics: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "apiVersion": "flagger.app/v1beta1",
        "kind": "Canary",
        "metadata": {"name": facts.name},
        "spec": {
            "targetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": facts.name},
            "service": {"port": 8000},
            "analysis": {
                "interval": "1m",
                "threshold": 5,
                "stepWeights": [max(1, round(100 * stage.traffic)) for stage in facts.stages],
                "metrics": metrics,
            },
        },
    }
