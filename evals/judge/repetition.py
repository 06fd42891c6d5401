"""What the repetition recorded in ``checks.json`` says about a run. Pure: judging needs no engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvgate.evals.log.records import EXACT


def repeat_identical(checks: Mapping[str, Any]) -> bool | None:
    """Whether the exact run, repeated, gave the same; None if it was not repeated."""
    exact = checks["repeat"].get(EXACT)
    return None if exact is None or exact["cells"] == 0 else exact["different"] == 0


def unsteady(checks: Mapping[str, Any]) -> dict[str, str]:
    """Labels of policies that answered differently when repeated, with the reason that makes them invalid."""
    return {
        label: f"{found['different']} of {found['cells']} repeated cells answer differently: the policy carries state "
        "from item to item or is not deterministic"
        for label, found in checks["repeat"].items()
        if label != EXACT and found["different"]
    }
