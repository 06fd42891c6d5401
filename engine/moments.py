"""Running mean and covariance of queries, mergeable chunk by chunk."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvgate.compressors.evidence import Moments


@dataclass(frozen=True)
class RunningMoments:
    """``count`` queries so far; ``total`` fp64 ``[L, Q, D]`` and ``products`` fp64 ``[L, Q, D, D]``, their sums."""

    count: int
    total: Tensor
    products: Tensor

    def moments(self) -> Moments | None:
        """Mean and covariance (divided by the count); None before the first query."""
        if self.count == 0:
            return None
        mean = self.total / self.count
        covariance = self.products / self.count - mean[..., :, None] * mean[..., None, :]
        return Moments(mean.float(), covariance.float())


def add_moments(before: RunningMoments | None, queries_LTQD: Tensor) -> RunningMoments:
    """``before`` and the fp32 queries of some more tokens."""
    by_head = queries_LTQD.transpose(1, 2)
    total = by_head.double().sum(2)
    products = (by_head.transpose(-1, -2) @ by_head).double()
    if before is None:
        return RunningMoments(queries_LTQD.shape[1], total, products)
    return RunningMoments(before.count + queries_LTQD.shape[1], before.total + total, before.products + products)
