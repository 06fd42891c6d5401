"""``kvgate suites``: what each suite measures, where its texts come from, and its floor."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

WIDEST = 100  # longer lines of prose are hard to follow


def add_parser(subparsers: Any) -> None:
    """Add ``suites`` to an argparse subparsers object."""
    parser = subparsers.add_parser("suites", description="List the suites that can be named.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=main)


def main(options: argparse.Namespace) -> int:
    """Print the suites, wrapped to the terminal (piped: to COLUMNS, or 80)."""
    found, broken = suites()
    for why in broken.values():
        print(f"kvgate: left out: {why}", file=sys.stderr)
    if options.json:
        print(json.dumps(found, indent=1))
        return 0
    width = min(shutil.get_terminal_size().columns, WIDEST)
    print("\n\n".join("\n".join(_lines(name, entry, width)) for name, entry in found.items()))
    return 0


def suites() -> tuple[dict[str, Any], dict[str, str]]:
    """Name -> what the class says about itself, by name; and why others are left out."""
    from kvgate.evals.suites.catalog import catalog

    known, broken = catalog()
    found = {
        name: {
            "measures": suite.measures,
            "why_eviction_hurts": suite.why_eviction_hurts,
            "origin": suite.origin(),
            "floor": suite.floor,
            "tasks": {
                task: {"about": about, "optional": task in suite.optional} for task, about in suite.tasks.items()
            },
        }
        for name, suite in sorted(known.items())
    }
    return found, broken


def _lines(name: str, entry: Mapping[str, Any], width: int) -> Iterator[str]:
    yield from _wrapped(f"{name}: {entry['measures']}", "", "  ", width)
    yield from _wrapped(f"why eviction hurts: {entry['why_eviction_hurts']}", "  ", "    ", width)
    yield from _wrapped(f"source: {entry['origin']}", "  ", "    ", width)
    floor = f"floor: {entry['floor']:g}; no verdict is given where the exact run is not shown to score this much"
    yield from _wrapped(floor, "  ", "    ", width)
    column = max(len(task) for task in entry["tasks"])
    for task, about in entry["tasks"].items():
        text = f"{about['about']}{' (only when asked for)' if about['optional'] else ''}"
        yield from _wrapped(text, f"  {task:{column}}  ", " " * (column + 4), width)


def _wrapped(text: str, first: str, rest: str, width: int) -> list[str]:
    # A revision or a data set's name is copied from here, so words are never cut.
    return textwrap.wrap(
        text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
