"""Running and looking things up from Python; reached as ``kvgate.run``, ``kvgate.policies`` and ``kvgate.suites``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvgate.compressors.policy import Policy
    from kvgate.evals.suites.base import Suite

__all__ = ["policies", "run", "suites"]


def run(plan: str | Path | Mapping[str, Any], out: str | Path, **overrides: Any) -> dict[str, Any]:
    """Run a plan into the folder ``out`` and judge it; a run that was interrupted there goes on.

    Args:
        plan: name of a shipped plan, a YAML file, or its content.
        overrides: keys of a plan that replace the plan's own (``model``, ``gate``, ``seed`` ...).

    Returns:
        The leaderboard, as in ``leaderboard.json``.

    Raises:
        ValueError: what the plan asks for cannot be run, or ``out`` holds another run.
    """
    from kvgate.evals.plan.config import load_plan, parse_plan
    from kvgate.evals.run.execute import execute
    from kvgate.evals.run.prepare import prepare

    if isinstance(plan, Mapping):
        config = parse_plan({"name": "plan", **plan, **overrides}, "plan")
    else:
        config = load_plan(str(plan), overrides)
    return execute(prepare(config), Path(out))


def policies() -> dict[str, type[Policy]]:
    """Name -> class of the policies that a plan can name, those of installed packages included."""
    from kvgate.compressors.catalog import catalog

    return catalog()


def suites() -> dict[str, type[Suite]]:
    """Name -> class of the suites that a plan can name; those of packages that cannot be imported are left out."""
    from kvgate.evals.suites.catalog import catalog

    return catalog()[0]
