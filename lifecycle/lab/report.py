"""Figures of a replay: a plain dictionary for JSON, and a short table for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgate.lifecycle.lab.simulator import Trail
from kvgate.lifecycle.lab.workloads import Arrival

SCHEMA_VERSION = 1
Floats = NDArray[np.float64]


def percentile(values: Floats, share: float) -> float | None:
    """The value at rank ``floor(share * n)`` (0-based) of the finite ones, as the reference figures count it."""
    found = np.sort(values[np.isfinite(values)])
    return float(found[min(len(found) - 1, int(share * len(found)))]) if len(found) else None


def _spread(values: Floats) -> dict[str, float | None]:
    found = values[np.isfinite(values)]
    return {
        **{f"p{round(100 * share)}": percentile(values, share) for share in (0.5, 0.95, 0.99)},
        "max": float(found.max()) if len(found) else None,
    }


def _part(arrivals: Sequence[Arrival], trail: Trail, mask: NDArray[np.bool_], bound: float | None) -> dict[str, Any]:
    at = np.array([a.at for a in arrivals])
    ttft, whole = (trail.first - at)[mask], (trail.end - at)[mask]
    done = np.array([s == "finished" for s in trail.state])[mask]
    good = done if bound is None else done & (np.nan_to_num(ttft, nan=np.inf) <= bound)
    return {
        "requests": int(mask.sum()),
        "states": dict(sorted(Counter(s for s, m in zip(trail.state, mask, strict=True) if m).items())),
        "ttft": _spread(ttft),
        "token_gap": _spread(np.where(np.isfinite(trail.first[mask]), trail.gap[mask], np.nan)),
        "end_to_end": _spread(np.where(done, whole, np.nan)),
        "preemptions": int(trail.preemptions[mask].sum()),
        "most_preemptions_of_one": int(trail.preemptions[mask].max(initial=0)),
        "recomputed_tokens": int(trail.recomputed[mask].sum()),
        "goodput_requests": int(good.sum()),
    }


def summarise(
    arrivals: Sequence[Arrival], trail: Trail, unit: str, bytes_per_block: int = 0, bound: float | None = None
) -> dict[str, Any]:
    """All figures of a run, in total and per tenant.

    Args:
        unit: of all times ("step" or "ms").
        bound: time to first token within which a finished request counts as good; None counts every finished one.
    """
    useful = sum(
        a.spec.prompt_len + a.out_len - 1 for a, s in zip(arrivals, trail.state, strict=True) if s == "finished"
    )
    tenants = np.array([a.spec.tenant for a in arrivals])
    recomputed = int(trail.recomputed.sum())
    return {
        "schema_version": SCHEMA_VERSION,
        "unit": unit,
        "rounds": trail.rounds,
        "total": _part(arrivals, trail, np.ones(len(arrivals), np.bool_), bound),
        "tenants": {str(t): _part(arrivals, trail, tenants == t, bound) for t in sorted(set(tenants.tolist()))},
        "computed_tokens": trail.computed,
        "recomputed_share": recomputed / useful if useful else 0.0,
        "swapped_blocks": trail.swapped_blocks,
        "swap_bytes": trail.swapped_blocks * bytes_per_block,
        "rejections": dict(sorted(trail.reasons.items())),
        "lowest_free_blocks": trail.lowest_free,
        "free_blocks_at_end": trail.free_at_end,
    }


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def table(figures: dict[str, Any]) -> str:
    """The figures as text, one line for all requests and one per tenant."""
    lines = [f"{'':12} {'done':>6} {'ttft p50':>9} {'p95':>8} {'p99':>8} {'gap max':>8} {'preempt':>8} {'again':>9}"]
    for name, part in [("all", figures["total"]), *figures["tenants"].items()]:
        ttft = part["ttft"]
        lines.append(
            f"{name[:12]:12} {part['states'].get('finished', 0):>6} {_cell(ttft['p50']):>9} {_cell(ttft['p95']):>8} "
            f"{_cell(ttft['p99']):>8} {_cell(part['token_gap']['max']):>8} {part['preemptions']:>8} "
            f"{part['recomputed_tokens']:>9,}"
        )
    share, rejected = figures["recomputed_share"], sum(figures["rejections"].values())
    lines.append(
        f"{figures['rounds']} rounds, times in {figures['unit']}s, {100 * share:.1f} % tokens computed again, "
        f"{figures['swapped_blocks']} blocks swapped, {rejected} rejected, "
        f"{figures['total']['goodput_requests']} good"
    )
    return "\n".join(lines)
