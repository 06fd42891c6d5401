"""What a step showed, added to what each row knows: attention mass, latest queries, length, taint."""

from __future__ import annotations

from collections.abc import Sequence as Several

import numpy as np
import torch
from torch import Tensor

from kvgate.engine.attention import Step
from kvgate.engine.mass import add_mass
from kvgate.engine.moments import add_moments
from kvgate.engine.rotation import Rotation
from kvgate.engine.sequence import Sequence


def gather_evidence(
    rows: Several[Sequence], counts: Several[int], step: Step, slots: Several[int], rotation: Rotation
) -> None:
    """``rows`` in the step's order, ``counts`` new tokens each, ``slots`` the slots of each row's table."""
    massed = [index for index, row in enumerate(rows) if row.needs("mass")]
    if massed:
        parts = [torch.stack(part, dim=1).flatten(3) for part in zip(*step.mass, strict=True)]
        for index, mass in zip(massed, (row for part in parts for row in part), strict=True):
            add_mass(rows[index], mass, slots[index])
    queries = torch.stack(step.queries) if step.observe else None
    at = 0
    for row, count in zip(rows, counts, strict=True):
        if queries is not None and row.window:
            latest = queries[:, max(at, at + count - row.window) : at + count].transpose(1, 2)
            seen = latest if row.queries is None else torch.cat((row.queries, latest), dim=2)
            row.queries = seen[:, :, -row.window :].clone()  # a view would hold the whole step's queries
        if queries is not None and row.skips:
            _add_moments(row, queries[:, at : at + count], rotation)
        row.tainted = row.tainted or _hides(row, count, step.native_windows)
        row.length += count
        at += count


def _add_moments(row: Sequence, queries_LTQD: Tensor, rotation: Rotation) -> None:
    positions = torch.arange(row.length, row.length + queries_LTQD.shape[1], device=queries_LTQD.device)
    plain = torch.stack(
        [
            rotation(queries.float().transpose(0, 1), -positions, layer).transpose(0, 1)
            for layer, queries in enumerate(queries_LTQD)
        ]
    )
    for skip in row.skips:
        before = row.moments.get(skip)
        row.moments[skip] = add_moments(before, plain[:, max(0, skip - row.length) :])


def _hides(row: Sequence, count: int, native_windows: tuple[int | None, ...]) -> bool:
    """Whether the row's bounds kept its ``count`` newest queries from a token the exact run would show them."""
    bounds = row.policy.bounds(row.protected) if row.policy else None
    if bounds is None:
        return False
    positions = np.arange(row.length, row.length + count)
    return any(bounds.hide(positions, window) for window in set(native_windows))
