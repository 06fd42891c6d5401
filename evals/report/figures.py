"""Figures of a leaderboard: paired differences with their limits, and quality against resident memory.

Every figure is narrow enough for a phone. Colours are Okabe and Ito's (2008, "Color Universal Design"), and nothing is
told by colour alone: verdicts have markers, policies have dashes and numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO, StringIO
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from kvgate.evals.report.names import ShortName, short_names, verdict_text

Row = Mapping[str, Any]
WIDTH = 4.8  # inches, about 460 CSS pixels
INK, FAINT = "#1b1f24", "#8c959f"
VERDICTS = {
    "enable": ("#0072b2", "o"), "block": ("#d55e00", "X"), "inconclusive": ("#b8860b", "s"),
    "not_evaluable": ("#737b84", "D"), "invalid": ("#b5488a", "v"),
}  # fmt: skip
_SERIES = (("#0072b2", "o", "-"), ("#d55e00", "s", "--"), ("#009e73", "D", "-."), ("#b5488a", "^", ":"))
STYLE: Any = {
    "font.size": 9.0, "font.family": "DejaVu Sans", "text.parse_math": False, "svg.fonttype": "none",
    "svg.hashsalt": "kvgate", "text.color": INK, "axes.edgecolor": FAINT, "axes.labelcolor": INK, "xtick.color": INK,
    "ytick.color": INK, "axes.spines.top": False, "axes.spines.right": False, "figure.facecolor": "none",
    "axes.facecolor": "none", "savefig.facecolor": "none", "legend.frameon": False, "axes.titlesize": 10.0,
}  # fmt: skip


def svg(figure: Figure, name: str) -> str:
    """The figure as SVG, the same bytes every time."""
    text = StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return text.getvalue()


def png(figure: Figure) -> bytes:
    """The figure as PNG on white, 160 dots an inch."""
    data = BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(data, format="png", dpi=160, facecolor="white", metadata={"Software": None})
    return data.getvalue()


def figures(board: Mapping[str, Any]) -> dict[str, Figure]:
    """Name to figure, in reading order: ``differences-<protocol>``, ``memory-<protocol>``."""
    names = short_names(board["rows"])
    made: dict[str, Figure] = {}
    with matplotlib.rc_context(STYLE):
        for protocol in sorted({row["protocol"] for row in board["rows"]}):
            rows = [row for row in board["rows"] if row["protocol"] == protocol]
            if any(row["suites"] for row in rows):
                made[f"differences-{protocol}"] = differences(rows, names)
            if any(row["status"] != "invalid" for row in rows):
                made[f"memory-{protocol}"] = memory(rows, names)
    return made


def differences(rows: Sequence[Row], names: Mapping[str, ShortName]) -> Figure:
    """A forest plot a suite: policy minus exact with anytime-valid limits, and the margin a policy must stay above."""
    suites = sorted({entry["suite"] for row in rows for entry in row["suites"]})
    figure = Figure(figsize=(WIDTH, (0.9 + 0.24 * len(rows)) * len(suites) + 0.3), layout="constrained")
    panels = figure.subplots(len(suites), 1, sharex=True, squeeze=False)[:, 0]
    for axes, suite in zip(panels, suites, strict=True):
        _forest(axes, rows, names, suite)
    panels[-1].set_xlabel("score, policy minus full KV")
    used = [status for status in VERDICTS if any(row["status"] == status for row in rows)]
    handles = [Line2D([], [], color=VERDICTS[s][0], marker=VERDICTS[s][1], ls="", label=verdict_text(s)) for s in used]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize=8, handletextpad=0.3)
    return figure


def _forest(axes: Axes, rows: Sequence[Row], names: Mapping[str, ShortName], suite: str) -> None:
    for place, row in enumerate(rows):
        colour, marker = VERDICTS[row["status"]]
        for entry in row["suites"]:
            if entry["suite"] == suite:
                axes.plot([entry["lower"], entry["upper"]], [place, place], color=colour, lw=1.6)
                axes.plot([entry["difference"]], [place], marker, color=colour, ms=5.5)
    found = [entry for row in rows for entry in row["suites"] if entry["suite"] == suite]
    axes.axvline(0.0, color=FAINT, lw=0.9)
    for margin in {entry["margin"] for entry in found}:
        axes.axvline(-margin, color=INK, lw=0.9, ls=(0, (4, 3)))
    axes.set_yticks(range(len(rows)), [str(names[row["label"]]) for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(-1.04, max(0.25, *(entry["upper"] for entry in found)) + 0.04)
    axes.set_title(f"{suite} (dashes: margin)", loc="left")
    axes.tick_params(axis="y", length=0)


def memory(rows: Sequence[Row], names: Mapping[str, ShortName]) -> Figure:
    """Mean score against resident MiB, one line a policy; rings mark rows that no other row beats in both."""
    sound = [row for row in rows if row["status"] != "invalid"]
    figure = Figure(figsize=(WIDTH, 3.7), layout="constrained")
    axes = figure.subplots()
    families = list(dict.fromkeys(names[row["label"]].family for row in sound))
    for number, family in enumerate(families):
        colour, marker, dashes = _SERIES[number % len(_SERIES)]
        own = [row for row in sound if names[row["label"]].family == family]
        across = [row["memory"]["resident_mib"] for row in own]
        up = [row["quality"] for row in own]
        axes.plot(across, up, marker=marker, ls=dashes, color=colour, ms=5, lw=1.2, label=family)
    best = [row for row in sound if row["pareto"]]
    axes.plot(
        [row["memory"]["resident_mib"] for row in best], [row["quality"] for row in best], "o", ms=12, mfc="none",
        mec=INK, mew=1.1, label="not dominated",
    )  # fmt: skip
    full = max(row["memory"]["exact_resident_mib"] for row in sound)
    axes.plot([full], [_exact_quality(sound)], "*", ms=11, color=INK, label="full KV")
    axes.set_xlabel("resident MiB when the answer starts, mean over items")
    axes.set_ylabel("mean score")
    axes.set_xlim(left=0.0, right=1.08 * full)
    axes.set_ylim(-0.03, 1.05)
    axes.grid(color=FAINT, alpha=0.3, lw=0.6)
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    return figure


def _exact_quality(rows: Sequence[Row]) -> float:
    found: float = rows[0]["exact_quality"]
    return found
