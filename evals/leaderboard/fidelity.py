"""What a row's fidelity turns say together. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from kvgate.evals.log.records import CellRecord, FidelityRecord


def fidelity_of(cells: Iterable[CellRecord]) -> dict[str, Any] | None:
    """KL and divergence over all positions of all fidelity turns; None for a row without any.

    ``kl_mean``, ``kl_p95``, ``kl_max``: KL(exact || policy) in nats. ``diverged``: share of answers in which the most
    likely token differs somewhere; ``first_divergence``: median position of the first such token, over those answers.
    Positions without a number (NaN logits) are left out of the KL and counted as ``broken``.
    """
    found = [turn.fidelity for cell in cells for turn in cell.turns if turn.fidelity is not None]
    values = sorted(value for record in found for value in record.kl if value is not None)
    if not values:
        return None
    firsts = [record.diverged for record in found if record.diverged is not None]
    return {
        "answers": len(found),
        "positions": len(values),
        "broken": _broken(found),
        "kl_mean": sum(values) / len(values),
        "kl_p95": values[min(len(values) - 1, len(values) * 95 // 100)],
        "kl_max": values[-1],
        "diverged": len(firsts) / len(found),
        "first_divergence": median(firsts) if firsts else None,
    }


def _broken(found: Sequence[FidelityRecord]) -> int:
    return sum(value is None for record in found for value in record.kl)


def fidelity_lines(board: Mapping[str, Any]) -> Iterator[str]:
    """One line a row that has fidelity turns, for readers."""
    for row in board["rows"]:
        found = row.get("fidelity")
        if found:
            first = found["first_divergence"]
            where = f", first at token {first:g} (median)" if first is not None else ""
            yield (
                f"{row['label']} ({row['protocol']}) fidelity: KL {found['kl_mean']:.3g} nats a token "
                f"(95 % under {found['kl_p95']:.3g}), {found['diverged']:.0%} of {found['answers']} answers "
                f"diverge{where}"
            )
