"""Progress of a run: a bar with rate and time left on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from kvgate.evals.run.execute import Progress

_LINE_EVERY = 30.0  # seconds


@contextmanager
def watched(*, quiet: bool) -> Iterator[Callable[[Progress], None]]:
    """A function to report to. Everything goes to standard error."""
    if quiet:
        yield lambda progress: None
    elif sys.stderr.isatty():
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("cells"),
            TextColumn("{task.fields[rate]}"), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
        )  # fmt: skip
        with Bar(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("starting", total=None, rate="")
            start = time.monotonic()

            def show(progress: Progress) -> None:
                bar.update(
                    task, completed=progress.done, total=progress.total, description=progress.note,
                    rate=_rate(progress, start),
                )  # fmt: skip

            yield show
    else:
        yield _lines()


def _lines() -> Callable[[Progress], None]:
    start = time.monotonic()
    last = -_LINE_EVERY

    def show(progress: Progress) -> None:
        nonlocal last
        now = time.monotonic() - start
        if now - last >= _LINE_EVERY or progress.done == progress.total:
            last = now
            left = (progress.total - progress.done) * now / progress.fresh if progress.fresh else None
            remaining = f", about {left:.0f} s left" if left is not None else ""
            rate = _rate(progress, start)
            print(f"{progress.done}/{progress.total} cells {rate} ({progress.note}){remaining}", file=sys.stderr)

    return show


def _rate(progress: Progress, start: float) -> str:
    seconds = time.monotonic() - start
    return f"{progress.fresh / seconds:.1f}/s" if progress.fresh and seconds > 0 else ""
