"""What ``kvgate prove`` must find, and how it is written down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvgate.evals.judge.simulated_rows import RowResult
from kvgate.evals.judge.simulation import Case, CaseResult, Settings

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Requirement:
    """One thing the gate must do, with what was measured."""

    text: str
    measured: float
    limit: float
    met: bool


def requirements(results: Sequence[CaseResult], rows: Sequence[RowResult], settings: Settings) -> list[Requirement]:
    """False-enable and false-block rates everywhere, power and mean items at the two stated points."""
    enables = [result.enabled for result in results if result.false_enable is not None]
    enables += [row.enabled for row in rows if row.enable_is_error]
    blocks = [result.blocked for result in results if result.false_block is not None]
    blocks += [row.blocked for row in rows if row.block_is_error]
    found = [
        Requirement(
            f"{name} at most {settings.alpha:.0%} in all {len(rates)} cases",
            rate,
            settings.alpha,
            rate <= settings.alpha,
        )
        for name, rates in (("false enables", enables), ("false blocks", blocks))
        for rate in [max(rates)]
    ]
    for margin, discordance, most in ((0.02, 0.02, 639.0), (0.05, 0.10, 412.0)):
        wanted = Case(margin, discordance, 1, "binary", "zero loss")
        point = next((result for result in results if result.case == wanted), None)
        if point is not None:
            where = f"at zero loss, margin {margin:g}, discordance {discordance:g}"
            found.append(Requirement(f"power {where}", point.enabled, 0.9, point.enabled >= 0.9))
            found.append(Requirement(f"mean items {where}", point.mean_items, most, point.mean_items <= most))
    return found


def report(
    results: Sequence[CaseResult], rows: Sequence[RowResult], required: Sequence[Requirement], settings: Settings
) -> dict[str, Any]:
    """JSON-ready record of a proof: the same settings give the same bytes."""
    return {
        "schema_version": SCHEMA_VERSION,
        "settings": asdict(settings),
        "requirements": [asdict(entry) for entry in required],
        "cases": [
            {**asdict(entry.case), **{k: v for k, v in asdict(entry).items() if k != "case"}} for entry in results
        ],
        "rows": [asdict(entry) for entry in rows],
    }
