"""Budgets of any shape, counted in slots: what a policy may hold, and whether it holds more."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvgate.compressors.policy import Policy, Shape, When


@dataclass(frozen=True)
class Limit:
    """What a row may hold, read from its policy once: a policy that answers otherwise later changes nothing."""

    budget: int
    budget_shape: Shape
    decides: When

    @staticmethod
    def of(policy: Policy, budget: int | None = None) -> Limit:
        """``budget``: what was promised for the policy, where that is known from elsewhere. ValueError if the policy
        gives itself more.
        """
        own = policy.budget
        if budget is not None and own > budget:
            raise ValueError(f"policy {policy.name}: gives itself a budget of {own}, was asked for {budget}")
        return Limit(own, policy.budget_shape, policy.decides)

    def covers(self, prompt: int, length: int) -> bool:
        """Whether nothing has to go: ``prompt`` tokens there were when it first decided, ``length`` at the end."""
        return self.budget >= (prompt if self.decides == "once" else length)


def grouped(counts: NDArray[np.int64], shape: Shape) -> NDArray[np.int64]:
    """``counts`` ``[L, H]`` summed over the heads that share a budget."""
    return counts if shape == "head" else counts.sum(-1) if shape == "layer" else np.array(counts.sum())


def allowed(policy: Policy | Limit, heads: tuple[int, ...], exact_slots: int | None = None, length: int = 0) -> int:
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


def excess(
    policy: Policy | Limit, counts: NDArray[np.int64], exact_slots: int | None = None, length: int = 0
) -> int | None:
    """The largest group's live slots if that is more than its budget; None if all budgets hold."""
    most = int(grouped(counts, policy.budget_shape).max())
    return most if most > allowed(policy, counts.shape, exact_slots, length) else None
