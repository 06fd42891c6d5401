"""Variants of a workload, so that a policy is judged on a family and not on one file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvgate.lifecycle.lab.workloads import Arrival

TUNED_SEEDS = (1, 2, 3, 4, 5)
UNSEEN_SEEDS = (101, 102, 103, 104, 105)


@dataclass(frozen=True)
class Variant:
    """A workload to run in a pool of ``blocks`` blocks."""

    name: str
    arrivals: list[Arrival]
    blocks: int


def scaled(arrivals: Sequence[Arrival], factor: float) -> list[Arrival]:
    """All lengths times ``factor``, at least 1 token each."""
    found = []
    for a in arrivals:
        spec = replace(
            a.spec,
            prompt_len=max(1, round(a.spec.prompt_len * factor)),
            max_tokens=max(1, round(a.spec.max_tokens * factor)),
        )
        found.append(replace(a, spec=spec, out_len=min(spec.max_tokens, max(1, round(a.out_len * factor)))))
    return found


def shuffled(arrivals: Sequence[Arrival], seed: int) -> list[Arrival]:
    """The same requests, each tenant's arrival times dealt out anew; callers wait as long as before."""
    random = np.random.default_rng(seed)
    by_tenant: dict[str, list[int]] = {}
    for i, a in enumerate(arrivals):
        by_tenant.setdefault(a.spec.tenant, []).append(i)
    found = list(arrivals)
    for places in by_tenant.values():
        times = random.permutation([arrivals[i].at for i in places])
        for i, at in zip(places, times.tolist(), strict=True):
            a = arrivals[i]
            cancel = None if a.cancel_at is None else at + a.cancel_at - a.at
            found[i] = replace(a, at=at, cancel_at=cancel)
    return sorted(found, key=lambda a: a.at)


def variants(arrivals: Sequence[Arrival], blocks: int, seeds: Sequence[int] = TUNED_SEEDS) -> list[Variant]:
    """The file itself, lengths and pool 20 % smaller and larger, and one shuffle of the arrivals a seed."""
    own = list(arrivals)
    return [
        Variant("as it is", own, blocks),
        Variant("lengths -20 %", scaled(own, 0.8), blocks),
        Variant("lengths +20 %", scaled(own, 1.2), blocks),
        Variant("pool -20 %", own, round(blocks * 0.8)),
        Variant("pool +20 %", own, round(blocks * 1.2)),
        *(Variant(f"arrivals {seed}", shuffled(own, seed), blocks) for seed in seeds),
    ]
