"""The attention mass of a row, slot by slot: it grows with the table and moves with the slots.

``row.mass`` is fp32 ``[L, H, S]`` or None where no policy needs it; S is at least the slots of the row's table.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvgate.engine.sequence import Sequence


def add_mass(row: Sequence, mass: Tensor, slots: int) -> None:
    """``mass`` ``[L, H, n]`` of one step onto what the row has; its table has ``slots`` slots a head."""
    if row.mass is None:
        row.mass = mass.new_zeros((*mass.shape[:2], slots))
    fit_mass(row, slots)
    shared = min(slots, mass.shape[-1])
    row.mass[..., :shared] += mass[..., :shared]


def fit_mass(row: Sequence, slots: int) -> None:
    """Room for ``slots`` slots a head, with some to spare."""
    if row.mass is not None and row.mass.shape[-1] < slots:
        grown = row.mass.new_zeros((*row.mass.shape[:2], slots + slots // 4))
        grown[..., : row.mass.shape[-1]] = row.mass
        row.mass = grown


def clear_mass(row: Sequence, keep: NDArray[np.bool_]) -> None:
    """Zero where ``keep`` ``[L, H, n]`` is False, so that a slot used again starts from nothing."""
    if row.mass is not None:
        row.mass[..., : keep.shape[-1]] *= _there(keep, row.mass)


def move_mass(row: Sequence, source: NDArray[np.int64], live: NDArray[np.bool_]) -> None:
    """The mass of slot ``source[..., s]`` to slot s, as the slots moved; zero where ``live`` is False."""
    if row.mass is not None:
        row.mass = row.mass.gather(-1, _there(source, row.mass)) * _there(live, row.mass)


def _there(array: NDArray[Any], like: Tensor) -> Tensor:
    return torch.from_numpy(array).to(like.device)
