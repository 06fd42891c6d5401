"""Canary configs in the languages of rollout tools: format -> file name -> text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from kvgate.serving.canary.settings import Canary
from kvgate.serving.rollout import argo, flagd, flagger, grafana, prometheus
from kvgate.serving.rollout.facts import Facts

Files = Mapping[str, str]


def render(canary: Canary, format: str) -> Files:
    """The files of one format. ValueError for an unknown one, or one that this verdict may not have."""
    makers: dict[str, Callable[[Facts], Files]] = {
        "argo": lambda f: {"argo.yaml": _yaml(argo.manifests(f), argo.__doc__)},
        "flagger": lambda f: {"flagger.yaml": _yaml(flagger.manifests(f), flagger.WARNING)},
        "flagd": lambda f: {"flagd.json": _json(flagd.flags(f))},
        "prometheus": lambda f: {
            prometheus.RULES_FILE: _yaml([prometheus.rules(f)], None),
            "kvgate-canary.tests.yaml": _yaml([prometheus.tests(f)], "promtool test rules kvgate-canary.tests.yaml"),
        },
        "grafana": lambda f: {"grafana.json": _json(grafana.dashboard(f))},
    }
    if format not in makers:
        raise ValueError(f"--format {format!r}: unknown; use one of {', '.join(makers)}")
    return makers[format](Facts.of(canary))


def _yaml(documents: list[dict[str, Any]], note: str | None) -> str:
    head = "".join(f"# {line}\n" if line else "#\n" for line in (note or "").strip().splitlines())
    return head + yaml.safe_dump_all(documents, sort_keys=False, allow_unicode=True, width=120)


def _json(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"
