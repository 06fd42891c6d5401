"""Leaderboards for a terminal: readable from 100 columns on."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvgate.evals.report.names import SYMBOLS, ShortName, printable, short_names, verdict_text
from kvgate.evals.report.slice_tables import drift_table, example_lines, grid_tables, plain_table, survival_tables

STYLES = {
    "enable": "bold green", "block": "bold red", "inconclusive": "yellow", "not_evaluable": "dim", "invalid": "magenta",
}  # fmt: skip
PIPED_WIDTH = 150  # columns where nobody says how many there are: no table of ours has to be split


class _StdoutConsole(Console):
    """Leaves a reader that has gone to the command line; rich's own exits with 1, which is a gate not passed."""

    def on_broken_pipe(self) -> None:
        raise  # noqa: PLE0704 - rich calls this where it handles the BrokenPipeError


def stdout_console() -> Console:
    """Standard output: as wide as the terminal; piped, as wide as COLUMNS says, or :data:`PIPED_WIDTH`.

    Printing raises BrokenPipeError when the reader of a pipe has gone.
    """
    columns = os.environ.get("COLUMNS", "")
    given = int(columns) if columns.isdecimal() else 0
    return _StdoutConsole(width=given or (None if sys.stdout.isatty() else PIPED_WIDTH))


def print_leaderboard(board: Mapping[str, Any], console: Console, *, reasons: bool = False) -> None:
    """Competence, policies and why each is not enabled; with ``reasons`` every reason, slice and example."""
    names = short_names(board["rows"])
    for part in competence_tables(board["exact"], console.width):
        console.print(part)
    for protocol in sorted({row["protocol"] for row in board["rows"]}):
        rows = [row for row in board["rows"] if row["protocol"] == protocol]
        console.print(rows_table(rows, names, _title(board, protocol)))
    console.print(Text("◆ no other policy of the protocol has less memory and a better score", style="dim"))
    if reasons:
        _print_slices(board, console, names)
    console.print(Text("\nReasons", style="bold"))
    for row in board["rows"]:
        _print_reasons(row, console, every=reasons)
    console.print(_footer(board))


def competence_tables(entries: Sequence[Mapping[str, Any]], width: int) -> Iterable[Group]:
    """What the exact run can do, lengths side by side: a slice it fails says nothing about a policy."""
    found = {(entry["suite"], entry["task"], entry["length"]): entry for entry in entries}
    lengths = sorted({length for _, _, length in found})
    most = max(1, (width - 28) // 23)
    for start in range(0, len(lengths), most):
        table = plain_table()
        table.add_column("suite")
        table.add_column("task")
        for length in lengths[start : start + most]:
            table.add_column(f"{length} tokens", justify="right", no_wrap=True)
        before = ""
        for suite, task in sorted({(suite, task) for suite, task, _ in found}):
            row = [_score(found.get((suite, task, length))) for length in lengths[start : start + most]]
            table.add_row(suite if suite != before else "", task, *row)
            before = suite
        yield Group(Text("Exact run (full KV): score [95 % interval] items", style="bold"), table)


def _score(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return "-"
    low, high = entry["interval"]
    return f"{entry['score']:.2f} [{low:.2f}, {high:.2f}] {entry['items']:>3}"


def rows_table(rows: Sequence[Mapping[str, Any]], names: Mapping[str, ShortName], title: str) -> Group:
    """Policies under one protocol: score by suite, paired difference with its limits, memory, verdict."""
    table = plain_table()
    table.add_column("policy", overflow="fold")
    table.add_column("kept", justify="right", no_wrap=True)
    table.add_column("suite", overflow="fold")
    for head in ("n", "exact", "policy", "difference\n(limits)", "worst\nslice", "MiB"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for _, found in groupby(rows, key=lambda row: names[row["label"]].family):
        group = list(found)
        table.add_section()
        # The mode stands under the name, so that a hundred columns are enough.
        name = names[group[0]["label"]]
        lines = sum(max(1, len(row["suites"])) for row in group)
        left = [name.policy, name.mode] if lines > 1 else [f"{name.policy}\n{name.mode}".strip()]
        for row in group:
            _add_row(table, row, names[row["label"]].budget, left)
    note = f"MiB: resident when the answer starts, mean over items; {_exact_mib(rows)} under full KV"
    return Group(Text(title, style="bold"), table, Text(note, style="dim"))


def _exact_mib(rows: Sequence[Mapping[str, Any]]) -> str:
    return " / ".join(sorted({f"{row['memory']['exact_resident_mib']:.1f}" for row in rows}))


def _title(board: Mapping[str, Any], protocol: str) -> str:
    gate = board["gate"]
    return (
        f"Policies, {protocol}, gate {gate['name']} (margins {gate['m_suite']:g} a suite, {gate['m_slice']:g} a slice)"
    )


def _add_row(table: Table, row: Mapping[str, Any], budget: str, left: list[str]) -> None:
    mib = f"{row['memory']['resident_mib']:.1f}{' ◆' if row['pareto'] else '  '}"
    verdict = Text(f"{SYMBOLS[row['status']]} {verdict_text(row['status'])}", style=STYLES[row["status"]])
    lines = [_suite_cells(row, suite) for suite in row["suites"]]
    last = (mib, verdict)
    for cells in lines or [("-", str(row["items"]), "-", "-", "-", "-")]:
        table.add_row(left.pop(0) if left else "", budget, *cells, *last)
        budget, last = "", ("", Text())


def _suite_cells(row: Mapping[str, Any], suite: Mapping[str, Any]) -> tuple[str, ...]:
    slices = [entry["difference"] for entry in row["slices"] if entry["suite"] == suite["suite"]]
    return (
        suite["suite"],
        str(suite["items"]),
        f"{suite['exact']:.2f}",
        f"{suite['policy']:.2f}",
        f"{_signed(suite['difference'])} ({_signed(suite['lower'])}, {_signed(suite['upper'])})",
        _signed(min(slices)) if slices else "-",
    )


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("0.", ".")


def _print_reasons(row: Mapping[str, Any], console: Console, *, every: bool) -> None:
    """The row's label, as commands take it, and what was found; only the first reason unless all are asked for."""
    verdict = f"{SYMBOLS[row['status']]} {verdict_text(row['status'])}"
    console.print(Text.assemble((verdict, STYLES[row["status"]]), " ", (row["label"], "bold"), f", {row['protocol']}"))
    for reason in row["reasons"] if every else row["reasons"][:1]:
        console.print(Padding(Text(printable(reason)), (0, 0, 0, 4)))
    for flag in row["flags"] if every else ():
        console.print(Padding(Text(f"note: {printable(flag)}", style="dim"), (0, 0, 0, 4)))


def _print_slices(board: Mapping[str, Any], console: Console, names: Mapping[str, ShortName]) -> None:
    for protocol, exact in board["grids"].items():
        rows = [row for row in board["rows"] if row["protocol"] == protocol]
        for table in grid_tables(exact, rows, names, console.width):
            console.print(table)
        for table in survival_tables(rows, names, console.width):
            console.print(table)
        if (drift := drift_table(rows, names)) is not None:
            console.print(drift)
    console.print(Text("\nDisagreements: the largest losses of each row", style="bold"))
    for row in board["rows"]:
        for line in example_lines(row, names[row["label"]]):
            console.print(line)


def _footer(board: Mapping[str, Any]) -> Text:
    checks, origin = board["checks"], board["provenance"]
    repeated = checks["repeat"].values()
    cells, different = (sum(found[key] for found in repeated) for key in ("cells", "different"))
    alone = checks["batch_invariance"]
    git = origin["git"]["revision"][:12] + ("+changes" if origin["git"]["dirty"] else "")
    return Text(
        f"\nrepeated: {different} of {cells} cells differ; exact rows run alone: {alone['different']} of "
        f"{alone['cells']} differ. model {origin['model']['name']} {origin['model']['weights_hash'][:12]}, "
        f"kvgate {origin['kvgate']} ({git})",
        style="dim",
    )
