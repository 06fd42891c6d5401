"""Leaderboards for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_STYLES = {
    "enable": "bold green", "block": "bold red", "inconclusive": "yellow", "not_evaluable": "dim", "invalid": "magenta",
}  # fmt: skip


def print_leaderboard(board: Mapping[str, Any], console: Console, *, reasons: bool = False) -> None:
    """Competence, rows, and one line of reason for each verdict that is not ``enable``."""
    console.print(competence_table(board))
    for protocol in sorted({row["protocol"] for row in board["rows"]}):
        console.print(rows_table(board, protocol))
    for row in board["rows"]:
        shown = row["reasons"] if reasons else row["reasons"][:1]
        for reason in shown:
            console.print(Text.assemble((f"{row['label']} ({row['protocol']}) ", "bold"), reason))
        for flag in row["flags"] if reasons else ():
            console.print(Text(f"  note: {flag}", style="dim"))
    console.print(_footer(board))


def competence_table(board: Mapping[str, Any]) -> Table:
    """What the exact run can do: a slice it fails says nothing about a policy."""
    table = Table(title="Exact run (full KV)", title_justify="left")
    for name in ("suite", "task", "length"):
        table.add_column(name)
    for name in ("items", "clusters", "score", "95 % interval"):
        table.add_column(name, justify="right")
    for entry in board["exact"]:
        low, high = entry["interval"]
        table.add_row(
            entry["suite"], entry["task"], str(entry["length"]), str(entry["items"]), str(entry["clusters"]),
            f"{entry['score']:.2f}", f"{low:.2f} - {high:.2f}",
        )  # fmt: skip
    return table


def rows_table(board: Mapping[str, Any], protocol: str) -> Table:
    """Policies under one protocol: score by suite, paired difference with its limits, memory, verdict."""
    table = Table(title=f"Policies, protocol {protocol}, gate {board['gate']['name']}", title_justify="left")
    table.add_column("policy@budget")
    table.add_column("suite")
    for name in ("n", "exact", "policy", "difference (limits)", "worst slice", "MiB", "exact MiB"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for row in (row for row in board["rows"] if row["protocol"] == protocol):
        _add_row(table, row)
    return table


def _add_row(table: Table, row: Mapping[str, Any]) -> None:
    memory = row["memory"]
    sizes = (f"{memory['resident_mib']:.1f}", f"{memory['exact_resident_mib']:.1f}")
    verdict = Text(row["status"].replace("_", " "), style=_STYLES[row["status"]])
    if not row["suites"]:
        table.add_row(row["label"], "-", str(row["items"]), "-", "-", "-", "-", *sizes, verdict)
    for number, suite in enumerate(row["suites"]):
        first = number == 0
        slices = [entry for entry in row["slices"] if entry["suite"] == suite["suite"]]
        worst = min(slices, key=lambda entry: float(entry["difference"]), default=None)
        table.add_row(
            row["label"] if first else "",
            suite["suite"],
            str(suite["items"]),
            f"{suite['exact']:.2f}",
            f"{suite['policy']:.2f}",
            f"{suite['difference']:+.2f} ({suite['lower']:+.2f}, {suite['upper']:+.2f})",
            f"{worst['difference']:+.2f}" if worst else "-",
            *(sizes if first else ("", "")),
            verdict if first else "",
        )


def _footer(board: Mapping[str, Any]) -> Text:
    checks, origin = board["checks"], board["provenance"]
    repeat, alone = checks["repeat"], checks["batch_invariance"]
    git = origin["git"]["revision"][:12] + ("+changes" if origin["git"]["dirty"] else "")
    return Text(
        f"repeated: {sum(e['different'] for e in repeat.values())} of {sum(e['cells'] for e in repeat.values())} cells "
        f"differ; exact rows run alone: "
        f"{alone['different']} of {alone['cells']} differ. model {origin['model']['name']} "
        f"{origin['model']['weights_hash'][:12]}, kvgate {origin['kvgate']} ({git})",
        style="dim",
    )
