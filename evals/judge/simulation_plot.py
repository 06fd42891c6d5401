"""The figure of ``kvgate prove``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvgate.evals.judge.simulation import MARGINS, CaseResult, Settings


def draw(results: Sequence[CaseResult], settings: Settings, path: Path) -> None:
    """Write a PNG: false enables of the e-process beside a t-test, then power and mean items at zero loss."""
    figure = Figure(figsize=(11.0, 7.5), layout="constrained")
    grid = figure.subplot_mosaic([["errors", "errors"], ["power", "items"]])
    _errors(grid["errors"], results, settings)
    _zero_loss(grid["power"], results, "enabled", "share enabled at zero loss")
    _zero_loss(grid["items"], results, "mean_items", "mean items until decided at zero loss")
    grid["items"].set_yscale("log")
    figure.suptitle(
        f"kvgate prove: {settings.replicates} replicates, a look every {settings.batch} items up to {settings.cap}",
        fontsize=11,
    )
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _errors(axes: Axes, results: Sequence[CaseResult], settings: Settings) -> None:
    wrong = sorted((entry for entry in results if entry.false_enable is not None), key=lambda entry: entry.enabled)
    places = range(len(wrong))
    rates = [entry.enabled for entry in wrong]
    errors = [entry.enabled_upper - entry.enabled for entry in wrong]
    axes.plot(places, [entry.t_enabled for entry in wrong], "x", color="#b2182b", label="t-test, same looks")
    axes.errorbar(
        places, rates, yerr=[[0.0] * len(wrong), errors], fmt="o", ms=4, color="#2166ac", label="e-process (upper 95 %)"
    )
    axes.axhline(settings.alpha, color="black", lw=0.8, ls="--", label=f"alpha = {settings.alpha:g}")
    axes.set_xlabel("cases with a true loss at or above the margin, sorted", fontsize=9)
    axes.set_ylabel("share falsely enabled", fontsize=9)
    axes.set_ylim(bottom=0.0)
    axes.legend(fontsize=8)


def _zero_loss(axes: Axes, results: Sequence[CaseResult], name: str, label: str) -> None:
    for margin in MARGINS:
        chosen = [
            entry
            for entry in results
            if (entry.case.margin, entry.case.truth) == (margin, "zero loss")
            and (entry.case.kind, entry.case.cluster_size) == ("binary", 1)
        ]
        if chosen:
            axes.plot(
                [entry.case.discordance for entry in chosen],
                [getattr(entry, name) for entry in chosen],
                "o-",
                label=f"margin {margin:g}",
            )
    axes.set_xlabel("share of items whose score differs", fontsize=9)
    axes.set_ylabel(label, fontsize=9)
    axes.legend(fontsize=8)
