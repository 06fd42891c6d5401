"""How much items of one cluster go together."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def intra_cluster_correlation(values: ArrayLike, clusters: ArrayLike) -> float | None:
    """Share of the variance that lies between clusters: 0 for independent items, 1 where a cluster's items are alike.

    Args:
        values: one number an item, ``[items]``; ``clusters``: the cluster of each, ``[items]``.

    Returns:
        The one-way analysis-of-variance estimate, which chance can make negative; None where no cluster has two items,
        where there is one cluster only, or where nothing varies.
        Source: Donner (1986), International Statistical Review 54(1), 67-82, for clusters of unequal size.
    """
    x = np.asarray(values, dtype=np.float64)
    _, place, sizes = np.unique(np.asarray(clusters), return_inverse=True, return_counts=True)
    groups, items = sizes.size, x.size
    if groups < 2 or items == groups:
        return None
    means = np.bincount(place, weights=x) / sizes
    between = float((sizes * (means - x.mean()) ** 2).sum()) / (groups - 1)
    within = float(((x - means[place]) ** 2).sum()) / (items - groups)
    typical = (items - float((sizes**2).sum()) / items) / (groups - 1)
    total = between + (typical - 1.0) * within
    return (between - within) / total if total > 0.0 else None
