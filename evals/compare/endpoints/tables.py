"""A comparison for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvgate.evals.compare.endpoints.verdict import EndpointVerdict
from kvgate.evals.judge.types import StratumResult
from kvgate.evals.report.tables import STYLES

SHOWN = 40  # slices in the table; the worst come first


def print_comparison(result: EndpointVerdict, console: Console) -> None:
    """Verdict, reasons, suites and slices, the largest loss first."""
    console.print(Text(f"{result.status}", style=STYLES[result.status]), f"by gate {result.gate}", _hash(result))
    console.print(f"{result.items} items in {result.clusters} clusters", highlight=False)
    for reason in result.reasons:
        console.print(f"  {reason}", highlight=False)
    console.print(_table("suites", result.suites))
    slices = sorted(result.slices, key=lambda entry: entry.difference)
    if slices:
        console.print(_table("slices, the largest loss first", slices[:SHOWN]))
    if len(slices) > SHOWN:
        console.print(f"{len(slices) - SHOWN} more slices: see --json", highlight=False)


def _hash(result: EndpointVerdict) -> str:
    return "" if result.shipped else f"(not a gate of kvgate: {result.gate_hash[:12]})"


def _table(title: str, entries: Sequence[StratumResult]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("where", "items", "clusters", "exact", "candidate", "difference", "limits", "margin", "status"):
        table.add_column(name, justify="left" if name in ("where", "status") else "right")
    for entry in entries:
        limits = f"[{entry.lower:+.3f}, {entry.upper:+.3f}]"
        numbers = (
            f"{entry.exact:.3f}",
            f"{entry.policy:.3f}",
            f"{entry.difference:+.3f}",
            limits,
            f"{entry.margin:.3f}",
        )
        table.add_row(Text(entry.name), str(entry.items), str(entry.clusters), *map(Text, numbers), entry.status)
    return table
