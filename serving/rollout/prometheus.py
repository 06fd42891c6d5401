"""Prometheus: alerting rules over the server's metrics, and unit tests of them for promtool."""

from __future__ import annotations

import math
from typing import Any

from kvgate.serving.rollout.facts import Facts

RULES_FILE = "kvgate-canary.rules.yaml"


def rules(facts: Facts) -> dict[str, Any]:
    """A file of rules."""
    s = facts.selector
    loss = f"kvgate_canary_quality_difference_upper{s} < -{facts.margin:g}"
    guard = f"kvgate_canary_guard_difference_lower{s} > on (policy, guard) kvgate_canary_guard_limit{s}"
    alerts = [
        _alert("KvgateCanaryQualityLoss", loss, "0m", "page", "The policy loses more than its margin."),
        _alert("KvgateCanaryGuard", guard, "0m", "page", "The policy arm is beyond a limit, beside the exact arm."),
        _alert("KvgateCanaryPaused", f"kvgate_canary_paused{s} == 1", "15m", "ticket", "Comparisons are missing."),
        _alert(
            "KvgateCanaryRolledBack", f'kvgate_canary_state{{policy="{facts.label}",state="rolled_back"}} == 1', "0m",
            "ticket", "The policy was rolled back and needs a new verdict.",
        ),
        _alert("KvgateCanaryNoData", f"absent(kvgate_canary_quality_difference{s})", "10m", "ticket", "No data."),
    ]  # fmt: skip
    return {"groups": [{"name": facts.name, "rules": alerts}]}


def tests(facts: Facts) -> dict[str, Any]:
    """Unit tests of the rules: each alert fires on what it is for, and none on a healthy canary."""
    return {
        "rule_files": [RULES_FILE],
        "evaluation_interval": "1m",
        "tests": [
            _test(facts, {}, []),
            _test(facts, {"upper": -2 * facts.margin}, ["KvgateCanaryQualityLoss"]),
            _test(facts, {"guard": 0.9}, ["KvgateCanaryGuard"]),
            _test(facts, {"paused": 1.0}, ["KvgateCanaryPaused"]),
            _test(facts, {"rolled_back": 1.0}, ["KvgateCanaryRolledBack"]),
            _test(facts, {"missing": 1.0}, ["KvgateCanaryNoData"]),
            _test(facts, {"upper": float("nan")}, []),
        ],
    }


def _alert(name: str, expr: str, wait: str, severity: str, text: str) -> dict[str, Any]:
    return {
        "alert": name,
        "expr": expr,
        "for": wait,
        "labels": {"severity": severity},
        "annotations": {"summary": text},
    }


def _test(facts: Facts, changed: dict[str, float], fires: list[str]) -> dict[str, Any]:
    policy = f'policy="{facts.label}"'
    (guard, limit) = facts.guards[0]
    values = {
        f"kvgate_canary_quality_difference_upper{{{policy}}}": changed.get("upper", 0.01),
        f'kvgate_canary_guard_difference_lower{{{policy},guard="{guard}"}}': changed.get("guard", 0.0),
        f'kvgate_canary_guard_limit{{{policy},guard="{guard}"}}': limit,
        f"kvgate_canary_paused{{{policy}}}": changed.get("paused", 0.0),
        f'kvgate_canary_state{{{policy},state="rolled_back"}}': changed.get("rolled_back", 0.0),
    }
    if "missing" not in changed:
        values[f"kvgate_canary_quality_difference{{{policy}}}"] = 0.0
    severities = {alert["alert"]: alert for alert in rules(facts)["groups"][0]["rules"]}
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": _values(value)} for name, value in values.items()],
        "alert_rule_test": [
            {"eval_time": "25m", "alertname": name, "exp_alerts": [_expected(facts, alert)] if name in fires else []}
            for name, alert in severities.items()
        ],
    }


def _expected(facts: Facts, alert: dict[str, Any]) -> dict[str, Any]:
    labels = {"policy": facts.label, **alert["labels"]}
    if alert["alert"] == "KvgateCanaryGuard":
        labels["guard"] = facts.guards[0][0]
    if alert["alert"] == "KvgateCanaryRolledBack":
        labels["state"] = "rolled_back"
    return {"exp_labels": labels, "exp_annotations": alert["annotations"]}


def _values(value: float) -> str:
    """Half an hour of it, a minute apart; promtool has no shorthand for NaN."""
    return " ".join(["NaN"] * 31) if math.isnan(value) else f"{value:g}x30"
