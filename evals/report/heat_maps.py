"""Heat maps of a leaderboard: score by context length and depth, one panel for full KV and one for each policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvgate.evals.leaderboard.limits import cell_limits
from kvgate.evals.report.figures import STYLE, WIDTH
from kvgate.evals.report.names import ShortName, short_names
from kvgate.evals.report.slice_tables import middle

COLUMNS = 3
_MAP = "cividis"  # even in lightness, and the same to colour-blind eyes (Nunez, Anderton & Renslow 2018)
Cells = Sequence[Mapping[str, Any]]
Panel = tuple[str, Cells]
Place = tuple[int, int]  # depth, length


def heat_maps(board: Mapping[str, Any]) -> dict[str, Figure]:
    """``heat-<protocol>-<suite>`` to figure, for every suite with more than one length or depth."""
    names = short_names(board["rows"])
    made: dict[str, Figure] = {}
    for protocol, exact in board["grids"].items():
        rows = [row for row in board["rows"] if row["protocol"] == protocol]
        for suite in sorted({cell["suite"] for cell in exact}):
            if sum(cell["suite"] == suite for cell in exact) > 1:
                panels = _laid_out(exact, rows, names)
                with matplotlib.rc_context(STYLE):
                    made[f"heat-{protocol}-{suite}"] = _heat(panels, suite)
    return made


def _laid_out(exact: Cells, rows: Sequence[Mapping[str, Any]], names: Mapping[str, ShortName]) -> list[Panel | None]:
    """Full KV on a line of its own, then each policy's budgets on lines of their own."""
    panels: list[Panel | None] = [("full KV", exact)]
    for _, group in groupby(rows, key=lambda row: names[row["label"]].family):
        panels += [None] * (-len(panels) % COLUMNS)
        panels += [(str(names[row["label"]]), row["grid"]) for row in group]
    return panels


def _heat(panels: Sequence[Panel | None], suite: str) -> Figure:
    assert panels[0] is not None
    own = [cell for cell in panels[0][1] if cell["suite"] == suite]
    lengths = sorted({cell["length"] for cell in own})
    depths = sorted({cell["depth"] for cell in own}, key=lambda depth: (depth is not None, depth or ""))
    lines = -(-len(panels) // COLUMNS)
    figure = Figure(figsize=(WIDTH, lines * (0.55 + 0.24 * len(depths)) + 0.45), layout="constrained")
    grid = figure.subplots(lines, COLUMNS, squeeze=False)
    for number, axes in enumerate(grid.flat):
        panel = panels[number] if number < len(panels) else None
        if panel is None:
            axes.set_axis_off()
            continue
        found = {(depths.index(c["depth"]), lengths.index(c["length"])): c for c in panel[1] if c["suite"] == suite}
        _panel(axes, panel[0], found, (len(depths), len(lengths)))
        axes.set_xticks(range(len(lengths)), [str(length) for length in lengths], fontsize=7)
        axes.set_yticks(range(len(depths)), [middle(depth) for depth in depths], fontsize=7)
    counts = {cell["items"] for cell in own}
    items = f"{min(counts)} to {max(counts)}" if len(counts) > 1 else f"{max(counts)}"
    figure.supxlabel(
        f"context length in tokens\nitems in each cell: {items}; line: 95 % interval, a cell is 0 to 100 wide",
        fontsize=8,
    )
    figure.supylabel("depth of the evidence", fontsize=8)
    return figure


def _panel(axes: Axes, name: str, found: Mapping[Place, Mapping[str, Any]], shape: Place) -> None:
    """Score in percent, and under it a line from its lower to its upper limit: a cell is as wide as 0 to 100."""
    scores = np.full(shape, np.nan)
    for place, cell in found.items():
        scores[place] = cell["score"]
    axes.imshow(scores, cmap=_MAP, vmin=0.0, vmax=1.0, aspect="auto", interpolation="nearest")
    axes.set_title(name.replace(" ", "\n", 1) if len(name) > 20 else name, fontsize=7.5)
    axes.tick_params(length=0)
    for (depth, length), cell in found.items():
        ink = "#000000" if cell["score"] > 0.5 else "#ffffff"
        axes.text(length, depth - 0.1, f"{100 * cell['score']:.0f}", ha="center", va="center", fontsize=6.5, color=ink)
        limits = cell_limits(cell)
        ends = [length - 0.42 + 0.84 * limit for limit in (limits.lower, limits.upper)]
        axes.plot(ends, [depth + 0.34] * 2, color=ink, lw=1.0, solid_capstyle="butt")
