"""The report's second part: memory, length and depth, tasks, the exact run. Every figure's numbers stand in tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from kvgate.evals.leaderboard.limits import cell_limits, percent
from kvgate.evals.report.names import ShortName
from kvgate.evals.report.page import esc, folded, inline_svg, table
from kvgate.evals.report.slice_tables import middle

Board = Mapping[str, Any]
Row = Mapping[str, Any]
Names = Mapping[str, ShortName]
Svgs = Mapping[str, str]


def differences(board: Board, svgs: Svgs) -> str:
    """The forest plots; their numbers stand in the rows' own tables above."""
    out = [
        '<h2 id="differences">Paired differences</h2>',
        "<p class='soft'>Policy minus full KV on the same items, with limits that hold however often somebody looked. "
        "A policy passes when its whole bar is right of the dashes (the margin), and loses when it is left of them. "
        "The numbers are under each row's reasons.</p>",
    ]
    figures = [_figure(svgs, f"differences-{protocol}", f"Paired differences, {protocol}") for protocol in _each(board)]
    return "\n".join([*out, f"<div class='two'>{''.join(figures)}</div>"])


def memory(board: Board, names: Names, svgs: Svgs) -> str:
    """Score against resident memory, by point estimates."""
    out = [
        '<h2 id="memory">Quality against memory</h2>',
        "<p class='soft'>Pages that are really held when the answer starts, mean over items. ◆: no other row of the "
        "protocol has less memory and a better score (by point estimates).</p>",
    ]
    for protocol in _each(board):
        rows = [row for row in board["rows"] if row["protocol"] == protocol]
        cells: list[list[str]] = []
        for family, group in groupby(rows, key=lambda row: names[row["label"]].family):
            cells.append([esc(family)])
            cells += [_memory_cells(row, names[row["label"]]) for row in group]
        numbers = table(["kept", "MiB", "of full", "live MiB", "score", "◆"], cells, esc(protocol))
        out.append(f"<div class='two'>{_figure(svgs, f'memory-{protocol}', f'Memory, {protocol}')}{numbers}</div>")
    return "\n".join(out)


def _memory_cells(row: Row, name: ShortName) -> list[str]:
    held = row["memory"]
    return [
        esc(name.budget), f"{held['resident_mib']:.1f}", f"{held['resident_share']:.0%}", f"{held['logical_mib']:.1f}",
        f"{row['quality']:.2f}", "◆" if row["pareto"] else "",
    ]  # fmt: skip


def heat(board: Board, names: Names, svgs: Svgs) -> str:
    """Score by context length and depth of the evidence."""
    out = [
        '<h2 id="depth">Where it breaks: length and depth</h2>',
        "<p class='soft'>Score in percent by context length and by where the evidence stands (0 start, 1 end of the "
        "context). White: no item there. Few items stand behind each cell: the line under a number is its 95 % "
        "interval, from 0 at the cell's left edge to 100 at its right, and the tables count the items.</p>",
    ]
    for protocol, exact in board["grids"].items():
        rows = [row for row in board["rows"] if row["protocol"] == protocol]
        for suite in sorted({cell["suite"] for cell in exact}):
            figure = _figure(svgs, f"heat-{protocol}-{suite}", f"Length and depth, {suite}, {protocol}")
            grids = [("full KV", exact), *((str(names[row["label"]]), row["grid"]) for row in rows)]
            numbers = folded("Numbers", _heat_table(grids, suite))
            out.append(f"<h3>{esc(suite)} <small class='soft'>{esc(protocol)}</small></h3>")
            out.append(f"<div class='flow'>{figure}{numbers}</div>")
    return "\n".join(out)


def _heat_table(grids: Iterable[tuple[str, Sequence[Mapping[str, Any]]]], suite: str) -> str:
    rows: list[list[str]] = []
    depths: list[str | None] = []
    for name, cells in grids:
        own = [cell for cell in cells if cell["suite"] == suite]
        depths = depths or sorted({c["depth"] for c in own}, key=lambda depth: (depth is not None, depth or ""))
        rows.append([esc(name)])
        for length, group in groupby(own, key=lambda cell: cell["length"]):
            found = {cell["depth"]: cell for cell in group}
            rows.append([str(length), *(_heat_cell(found.get(depth), name == "full KV") for depth in depths)])
    heads = ["tokens", *(f"{middle(depth)}" for depth in depths)]
    return table(
        heads,
        rows,
        "score in percent; small: its 95 % interval, and under full KV the items (n), under a policy the percent of "
        "the evidence still attended (e)",
    )


def _heat_cell(cell: Mapping[str, Any] | None, counted: bool) -> str:
    if cell is None:
        return "-"
    small = [percent(cell_limits(cell))]
    if counted:
        small.append(f"n {cell['items']}")
    elif cell["evidence_kept"] is not None:
        small.append(f"e {100 * cell['evidence_kept']:.0f}")
    # Under each other, so that a table of five depths is no wider than a phone.
    return f"{100 * cell['score']:.0f}<br><small>{'<br>'.join(small)}</small>"


def survival(board: Board, names: Names) -> str:
    """Which tasks and turns survive: rows are answers, columns are the budgets of one policy."""
    out = [
        '<h2 id="survival">What survives, task by task</h2>',
        "<p class='soft'>Of the answers that full KV gets right, how many the policy still gets right. One instruction "
        "that is silently lost shows here, not in a mean.</p>",
    ]
    for protocol in _each(board):
        rows = [row for row in board["rows"] if row["protocol"] == protocol and row["survival"]]
        parts = []
        for family, group in groupby(rows, key=lambda row: names[row["label"]].family):
            parts.append(f"<div><h3>{esc(family)}</h3>{_survival_table(list(group), names)}</div>")
        out.append(f"<h3>{esc(protocol)}</h3><div class='two'>{''.join(parts)}</div>")
        out.append(_drift_table(rows, names))
    return "\n".join(out)


def _drift_table(rows: Sequence[Row], names: Names) -> str:
    """Length and repetition of long answers; nothing where none is long."""
    cells: list[list[str]] = []
    for row in rows:
        if row.get("drift"):
            cells.append([esc(str(names[row["label"]]))])
        cells += [
            [
                f"{esc(e['suite'])} {esc(e['task'])} <small>{e['length']}</small>",
                f"{e['tokens']:.0f}<small>/{e['exact_tokens']:.0f}</small>",
                f"{e['repetition']:.2f}<small>/{e['exact_repetition']:.2f}</small>",
                f"{e['loops']}<small>/{e['exact_loops']}</small>",
            ]
            for e in row.get("drift", ())
        ]
    if not cells:
        return ""
    caption = (
        "long answers: policy, small: full KV; repeated: share of 4-grams seen before; loops: answers that end in one"
    )
    return table(["suite, task, context", "tokens", "repeated", "loops"], cells, caption)


def _survival_table(rows: Sequence[Row], names: Names) -> str:
    found = {(row["label"], e["suite"], e["task"], e["turn"]): e for row in rows for e in row["survival"]}
    cells: list[list[str]] = []
    for suite, group in groupby(sorted({key[1:] for key in found}), key=lambda key: key[0]):
        cells.append([esc(suite)])
        for key in group:
            entries = [found.get((row["label"], *key)) for row in rows]
            cells.append([f"{esc(key[1])} <small>{esc(key[2])}</small>", *map(_survival_cell, entries)])
    return table(["task, turn", *(esc(names[row["label"]].budget) for row in rows)], cells)


def _survival_cell(entry: Mapping[str, Any] | None) -> str:
    return "-" if entry is None else f"{entry['survived']}<small>/{entry['right']}</small>"


def exact_run(board: Board) -> str:
    """What the model can do with everything in its cache."""
    cells: list[list[str]] = []
    for suite, group in groupby(board["exact"], key=lambda entry: entry["suite"]):
        cells.append([esc(suite)])
        cells += [
            [
                f"{esc(e['task'])} <small>{e['length']}</small>", f"{e['items']}", f"{e['score']:.2f}",
                f"{e['interval'][0]:.2f} to {e['interval'][1]:.2f}",
            ]
            for e in group
        ]  # fmt: skip
    return (
        '<h2 id="exact">The exact run</h2><p class="soft">Full KV by task and length, with 95 % intervals. Where it '
        "fails, a policy cannot be judged.</p>" + table(["task, tokens", "items", "score", "interval"], cells)
    )


def about(board: Board) -> str:
    """Checks and provenance."""
    origin, checks, gate = board["provenance"], board["checks"], board["gate"]
    repeat = [(label, found) for label, found in checks["repeat"].items() if found["different"]]
    cells = sum(found["cells"] for found in checks["repeat"].values())
    unsteady = ", ".join(f"{esc(label)}: {found['different']}" for label, found in repeat) or "none"
    alone = checks["batch_invariance"]
    facts = {
        "repeated cells that differ": f"{unsteady} (of {cells})",
        "exact rows run alone that differ": f"{alone['different']} of {alone['cells']}",
        "gate": ", ".join(f"{esc(key)} {esc(value)}" for key, value in gate.items() if isinstance(value, int | float)),
        "model": f"{esc(origin['model']['name'])}, revision {esc(origin['model']['revision'])}, weights "
        f"{esc(origin['model']['weights_hash'])}",
        "kvgate": f"{esc(origin['kvgate'])}, git {esc(origin['git']['revision'])}"
        + (" with uncommitted changes" if origin["git"]["dirty"] else ""),
        "python and packages": f"{esc(origin['python'])}; "
        + ", ".join(f"{esc(name)} {esc(version)}" for name, version in origin["packages"].items()),
        "machine": ", ".join(f"{esc(key)} {esc(value)}" for key, value in origin["machine"].items()),
        "config hash": esc(board["config_hash"]),
        "samples hash": esc(board["samples_hash"]),
    }
    items = "".join(f"<li><strong>{name}</strong>: {text}</li>" for name, text in facts.items())
    return f'<h2 id="about">Checks and provenance</h2><ul class="soft">{items}</ul>'


def _each(board: Board) -> list[str]:
    return sorted({row["protocol"] for row in board["rows"]})


def _figure(svgs: Svgs, name: str, label: str) -> str:
    if name not in svgs:
        return ""
    return f"<figure>{inline_svg(svgs[name], label)}<figcaption>{esc(label)}</figcaption></figure>"
