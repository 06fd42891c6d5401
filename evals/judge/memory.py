"""The rule of memory: what a row holds must fall by what its label promises."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from kvgate.evals.judge.gates import Gate
from kvgate.evals.log.records import CellRecord


def held_too_much(cells: Sequence[CellRecord], gate: Gate, page_size: int) -> list[str]:
    """Every length at which a row's resident bytes are more than its budget's, each one sentence with numbers.

    A budget of b tokens per (layer, kv head) promises the exact run's bytes times the share of ``ceil(b / page) + 1``
    pages among the ``ceil(context / page)`` of the context, since pages are whole and one more may be begun. The gate
    allows ``memory_tolerance`` of the exact run's bytes beyond. Lossless (native) eviction and items that fit the
    budget whole promise nothing.
    """
    groups: dict[int, list[CellRecord]] = defaultdict(list)
    for cell in cells:
        if not cell.covered and not cell.native and cell.budget is not None:
            groups[cell.length].append(cell)
    return [text for length in sorted(groups) if (text := _sentence(length, groups[length], gate, page_size))]


def _sentence(length: int, cells: Sequence[CellRecord], gate: Gate, page_size: int) -> str | None:
    exact = sum(cell.exact_resident_bytes for cell in cells)
    held = sum(cell.resident_bytes for cell in cells)
    promised = sum(cell.exact_resident_bytes * promised_share(cell, page_size) for cell in cells)
    if held <= promised + gate.memory_tolerance * exact:
        return None
    return (
        f"length {length}: {held / exact:.1%} of the exact run's bytes stay resident, the budget's whole pages are "
        f"{promised / exact:.1%}, with a tolerance of {gate.memory_tolerance:.0%}"
    )


def promised_share(cell: CellRecord, page_size: int) -> float:
    """Share of the exact run's pages that the budget may hold, at most 1."""
    return min(1.0, (-(-(cell.budget or 0) // page_size) + 1) / max(1, -(-cell.context_tokens // page_size)))
