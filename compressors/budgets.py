"""Budgets of any shape, counted in slots: what a policy may hold, and whether it holds more."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvgate.compressors.policy import Policy, Shape


def grouped(counts: NDArray[np.int64], shape: Shape) -> NDArray[np.int64]:
    """``counts`` ``[L, H]`` summed over the heads that share a budget."""
    return counts if shape == "head" else counts.sum(-1) if shape == "layer" else np.array(counts.sum())


def allowed(policy: Policy, heads: tuple[int, ...], exact_slots: int | None = None, length: int = 0) -> int:
    """Most live slots of each group of heads that share a budget; ``heads`` is (L, H).

    A budget for the whole model is of what the exact run holds: layers that declare a window hold less than ``length``
    tokens a head (``exact_slots`` over all heads), and the budget shrinks in proportion, or nothing would go elsewhere.
    """
    layers, each = heads
    if policy.budget_shape == "head":
        return policy.budget
    if policy.budget_shape == "layer":
        return policy.budget * each
    if exact_slots is None or length == 0 or exact_slots >= length * layers * each:
        return policy.budget * layers * each
    return policy.budget * exact_slots // length


def excess(policy: Policy, counts: NDArray[np.int64], exact_slots: int | None = None, length: int = 0) -> int | None:
    """The largest group's live slots if that is more than its budget; None if all budgets hold."""
    most = int(grouped(counts, policy.budget_shape).max())
    return most if most > allowed(policy, counts.shape, exact_slots, length) else None
