"""Grafana: a dashboard of the rollout, for import. The data source is asked for when it is imported."""

from __future__ import annotations

from typing import Any

from kvgate.serving.rollout.facts import Facts

_SOURCE = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}


def dashboard(facts: Facts) -> dict[str, Any]:
    """The dashboard as its JSON model."""
    s = facts.selector
    by_arm = "histogram_quantile(0.99, sum by (le, arm) (rate({}_bucket[5m])))"
    panels: list[tuple[str, str, list[tuple[str, str]]]] = [
        ("State", "none", [(f"kvgate_canary_state{s} == 1", "{{state}}")]),
        ("Traffic", "percentunit", [(f"kvgate_canary_traffic_ratio{s}", "under the policy")]),
        (
            "Quality, policy minus exact",
            "none",
            [
                (f"kvgate_canary_quality_difference_lower{s}", "lower limit"),
                (f"kvgate_canary_quality_difference{s}", "mean"),
                (f"kvgate_canary_quality_difference_upper{s}", "upper limit"),
                (f"-kvgate_canary_quality_margin{s}", "margin"),
            ],
        ),
        ("Guards, policy minus exact", "percentunit", [(f"kvgate_canary_guard_difference{s}", "{{guard}}")]),
        ("Time to first token, p99", "s", [(by_arm.format("kvgate_answer_first_token_seconds"), "{{arm}}")]),
        ("Longest token gap, p99", "s", [(by_arm.format("kvgate_answer_longest_gap_seconds"), "{{arm}}")]),
        ("Requests under the policy", "none", [(f"kvgate_canary_exposed_requests{s}", "requests")]),
        (
            "Lost comparisons",
            "percentunit",
            [("rate(kvgate_lost_comparisons_total[10m]) / sum(rate(kvgate_answers_total[10m]))", "share of answers")],
        ),
    ]
    return {
        "title": f"kvgate canary {facts.label}",
        "uid": facts.name[:40],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "time": {"from": "now-6h", "to": "now"},
        "refresh": "30s",
        "__inputs": [
            {"name": "DS_PROMETHEUS", "label": "Prometheus", "type": "datasource", "pluginId": "prometheus"},
        ],
        "templating": {"list": []},
        "annotations": {"list": []},
        "panels": [_panel(i, *panel) for i, panel in enumerate(panels)],
    }


def _panel(place: int, title: str, unit: str, queries: list[tuple[str, str]]) -> dict[str, Any]:
    return {
        "id": place + 1,
        "type": "timeseries",
        "title": title,
        "datasource": _SOURCE,
        "gridPos": {"x": 12 * (place % 2), "y": 8 * (place // 2), "w": 12, "h": 8},
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "expr": expr, "legendFormat": legend, "datasource": _SOURCE}
            for i, (expr, legend) in enumerate(queries)
        ],
    }
