"""Native sliding windows: pages behind a declared window are never attended again and freed in the exact run too.

A layer with window ``w`` lets a query at position ``q`` attend positions ``q - w + 1 .. q``. The next query stands at
``settled`` (tokens already settled, so that is the next position): positions below ``settled - w + 1`` are dead. Only
settled tokens count: a token in flight, or a speculative one that may be rejected, moves no boundary.
"""

from __future__ import annotations


def dead_tokens(settled: int, window: int) -> int:
    """Positions ``0 .. n - 1`` that no later query can attend, given ``settled`` tokens; returns ``n``.

    Raises ValueError for a window under 1 or a negative count.
    """
    if window < 1 or settled < 0:
        raise ValueError(f"window {window} and {settled} settled tokens: need at least 1 and 0")
    return max(0, settled - window + 1)


def dead_pages(settled: int, window: int, page_size: int) -> int:
    """Whole pages from the front that hold dead positions only."""
    return dead_tokens(settled, window) // page_size


def pages_held(length: int, window: int | None, page_size: int) -> int:
    """Pages a layer holds at most for ``length`` tokens: all, or those a window reaches, once the rest is freed."""
    whole = -(-length // page_size)
    return whole if window is None else whole - dead_pages(length, window, page_size)
