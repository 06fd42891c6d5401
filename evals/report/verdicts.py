"""The report's first part: what may be enabled, and every row's verdict with its reasons and numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from kvgate.evals.report.names import ShortName, verdict_text
from kvgate.evals.report.page import chip, esc, folded, table

Board = Mapping[str, Any]
Row = Mapping[str, Any]
Names = Mapping[str, ShortName]


def opening(board: Board, names: Names) -> str:
    """Title, the answer in one sentence, and what was judged."""
    rows, model, gate = board["rows"], board["provenance"]["model"], board["gate"]
    enabled = [f"{esc(names[r['label']])} ({esc(r['protocol'])})" for r in rows if r["status"] == "enable"]
    counts = Counter(row["status"] for row in rows)
    others = ", ".join(
        f"{count} {verdict_text(status)}" for status, count in counts.most_common() if status != "enable"
    )
    if enabled:
        answer = f"May be enabled: <strong>{'; '.join(enabled)}</strong>."
        answer += " For shadow traffic only, says the gate." if gate["shadow_only"] else ""
    else:
        answer = "<strong>Nothing may be enabled.</strong>"
    return (
        f"<h1>kvgate: {esc(board['name'])}</h1>"
        f'<p class="soft">model {esc(model["name"])} ({esc(model["dtype"])}, weights '
        f"{esc(model['weights_hash'][:12])}), gate {esc(gate['name'])}: at most {gate['m_suite']:g} of a suite's score "
        f"may be lost, {gate['m_slice']:g} of a slice's, proved at {1 - gate['alpha']:.0%}</p>"
        f'<p class="big">{answer}{" Of " + str(len(rows)) + " rows: " + others + "." if others else ""}</p>'
    )


def verdicts(board: Board, names: Names) -> str:
    """All rows in one table, then a block each."""
    protocols = sorted({row["protocol"] for row in board["rows"]})
    out = ['<h2 id="verdicts">Verdicts</h2><div class="two">']
    for protocol in protocols:
        rows = [row for row in board["rows"] if row["protocol"] == protocol]
        cells: list[list[str]] = []
        family = ""
        for row in rows:
            name = names[row["label"]]
            if name.family != family:
                cells.append([esc(name.family)])
                family = name.family
            memory = row["memory"]
            cells.append(
                [
                    f'<a href="#{_anchor(row)}">{esc(name.budget)}</a>',
                    f"{memory['resident_mib']:.1f}",
                    f"{row['quality']:.2f}",
                    chip(row["status"]),
                ]
            )
        full = rows[0]
        caption = (
            f"{esc(protocol)}. Full KV: {full['memory']['exact_resident_mib']:.1f} MiB, score "
            f"{full['exact_quality'] or 0.0:.2f}"
        )
        out.append(f"<div>{table(['kept', 'MiB', 'score', 'verdict'], cells, caption)}</div>")
    out.append("</div><h2>Reasons</h2>")
    for protocol in protocols:
        blocks = [_block(row, names[row["label"]]) for row in board["rows"] if row["protocol"] == protocol]
        out.append(f"<h3>{esc(protocol)}</h3><div class='flow'>{''.join(blocks)}</div>")
    return "\n".join(out)


def _anchor(row: Row) -> str:
    return "row-" + "".join(char if char.isalnum() else "-" for char in f"{row['label']}-{row['protocol']}")


def _block(row: Row, name: ShortName) -> str:
    memory = row["memory"]
    reasons = [esc(reason) for reason in row["reasons"]] or ["no reason given"]
    shown = 2 if row["status"] == "block" else 1  # what is proved, and where
    first, more = "<br>".join(reasons[:shown]), reasons[shown:]
    flags = [f"note: {esc(flag)}" for flag in row["flags"]]
    rest = "".join(f"<li>{text}</li>" for text in [*more, *flags])
    inside = (f"<ul>{rest}</ul>" if rest else "") + _numbers(row)
    scope = row["scope"]
    scoped = ", ".join(map(str, scope["lengths"])) or "none"
    return (
        f'<section class="block" id="{_anchor(row)}"><h3>{esc(name)} {chip(row["status"])}</h3>'
        f'<p class="soft">{memory["resident_mib"]:.1f} of {memory["exact_resident_mib"]:.1f} '
        f"MiB resident ({memory['resident_share']:.0%}); {row['evicted_tokens']:.0f} tokens evicted on average; "
        f"judged at lengths {scoped}; label <code>{esc(row['label'])}</code></p>"
        f"<p>{first}</p>{folded('All reasons and numbers', inside)}</section>"
    )


def _numbers(row: Row) -> str:
    if not row["suites"]:
        return "<p class='soft'>No pair was judged.</p>"
    out = [table(["suite", "n", "full", "policy", "difference<br><small>limits</small>"], map(_stratum, row["suites"]))]
    if row["slices"]:
        out.append(
            table(["slice", "n", "full", "policy", "difference<br><small>limits</small>"], map(_stratum, row["slices"]))
        )
    lengths = [
        [esc(e["suite"]), f"{e['exact']:.1f}", f"{e['policy']:.1f}", "-" if e["ratio"] is None else f"{e['ratio']:.2f}"]
        for e in row["lengths"]
    ]
    out.append(table(["answer tokens", "full", "policy", "ratio"], lengths))
    return "".join(out)


def _stratum(entry: Mapping[str, Any]) -> list[str]:
    name = esc(entry["name"].removeprefix(entry["suite"] + ", "))
    return [
        f"{name}<br><small>{verdict_text(entry['status'])} at {entry['margin']:g}</small>",
        f"{entry['items']}",
        f"{entry['exact']:.2f}",
        f"{entry['policy']:.2f}",
        f"{entry['difference']:+.2f}<br><small>{entry['lower']:+.2f} to {entry['upper']:+.2f}</small>",
    ]
