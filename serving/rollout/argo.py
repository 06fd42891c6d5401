"""Argo Rollouts: an AnalysisTemplate and a Rollout that uses it.

Argo fails an analysis on ``failureCondition``, succeeds on ``successCondition`` and pauses the rollout when neither is
true. So the failure is a loss whose lower limit is beyond the margin, success one whose upper limit is inside it; no
data and NaN make neither true.
"""

from __future__ import annotations

from typing import Any

from kvgate.serving.rollout.facts import Facts

PROMETHEUS = "http://prometheus.monitoring.svc:9090"
IMAGE = "registry.example/kvgate:0.1.0"


def manifests(facts: Facts) -> list[dict[str, Any]]:
    """In the order in which they are applied. ValueError for a verdict that allows shadows only."""
    if facts.shadow_only:
        raise ValueError("argo: this verdict allows shadows only; `kvgate serve --canary` carries them out")
    return [_analysis(facts), _rollout(facts)]


def _analysis(facts: Facts) -> dict[str, Any]:
    name, matcher = "kvgate_canary_quality_difference", facts.selector
    # A loss is exact minus policy: its lower limit is minus the upper one of the difference.
    metrics = [_metric("quality-loss", f"-{name}_upper{matcher}", f"-{name}_lower{matcher}", facts.margin)]
    for guard, limit in facts.guards:
        name, matcher = "kvgate_canary_guard_difference", f'{{policy="{facts.label}",guard="{guard}"}}'
        metrics.append(_metric(guard.replace("_", "-"), f"{name}_lower{matcher}", f"{name}_upper{matcher}", limit))
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "AnalysisTemplate",
        "metadata": {"name": facts.name},
        "spec": {"metrics": metrics},
    }


def _metric(name: str, lower: str, upper: str, limit: float) -> dict[str, Any]:
    """1 where the upper limit is inside, -1 where the lower one is beyond, 0 for neither and for NaN; the worst pod."""
    query = f"min by (policy) (({upper} < bool {limit:g}) - ({lower} > bool {limit:g}))"
    return {
        "name": name,
        "interval": "1m",
        "count": 60,
        "failureLimit": 0,
        "inconclusiveLimit": 59,
        "consecutiveErrorLimit": 10,
        "failureCondition": "len(result) > 0 && result[0] < 0",
        "successCondition": "len(result) > 0 && result[0] > 0",
        "provider": {"prometheus": {"address": PROMETHEUS, "query": query}},
    }


def _rollout(facts: Facts) -> dict[str, Any]:
    labels = {"app": facts.name}
    steps: list[dict[str, Any]] = []
    for stage in facts.stages:
        # Whole percents are all that setWeight knows; under 1 % is rounded up.
        steps.append({"setWeight": max(1, round(100 * stage.traffic))})
        steps.append({"analysis": {"templates": [{"templateName": facts.name}]}})
    container = {
        "name": "kvgate",
        "image": IMAGE,
        "args": ["serve", "--host", "0.0.0.0", "--canary", "/canary/canary.yaml", "--state", "/state"],
        "ports": [{"containerPort": 8000}],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": 8000}},
        "livenessProbe": {"httpGet": {"path": "/health", "port": 8000}},
        "volumeMounts": [{"name": "canary", "mountPath": "/canary"}, {"name": "state", "mountPath": "/state"}],
    }
    volumes = [{"name": "canary", "configMap": {"name": facts.name}}, {"name": "state", "emptyDir": {}}]
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Rollout",
        "metadata": {"name": facts.name},
        "spec": {
            "replicas": 4,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [container], "volumes": volumes}},
            "strategy": {"canary": {"steps": steps}},
        },
    }
