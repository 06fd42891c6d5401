"""How many tokens a request will generate: learned per tenant, always within its own bound.

What is learned is the share of ``max_tokens`` that gets used, as a survival curve over equal bins: the Kaplan-Meier
product-limit estimator (Kaplan and Meier 1958), so requests still running count as "at least this much" instead of
being ignored, which would bias the estimate to short answers. A geometric prior counts as ``prior_weight`` requests;
finished requests are forgotten with a memory of ``memory`` requests.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvgate.lifecycle.config import EstimatorConfig

Floats = NDArray[np.float64]


class LengthEstimator:
    """Survival curves of the used share of ``max_tokens``, one per tenant account.

    Attributes:
        survival: fp64 ``[accounts, bins + 1]``, probability that a request uses more than ``k / bins`` of its bound;
            1 at 0, 0 at ``bins``.
    """

    def __init__(self, config: EstimatorConfig) -> None:
        self.config = config
        bins = config.bins
        self._ended = np.zeros((0, bins))
        self._reached = np.zeros((0, bins))
        # The hazard of a geometric distribution with this mean, the same in every bin.
        self._prior = min(1.0, 1.0 / max(1.0, config.prior_mean * bins))
        self.survival = np.zeros((0, bins + 1))

    def account(self, index: int) -> None:
        """Make room for tenant account ``index``."""
        if index < len(self.survival):
            return
        # Doubled, so that many tenants do not copy all curves for each of them.
        missing = max(index + 1, 2 * len(self.survival)) - len(self.survival)
        self._ended = np.pad(self._ended, ((0, missing), (0, 0)))
        self._reached = np.pad(self._reached, ((0, missing), (0, 0)))
        self.survival = np.concatenate([self.survival, np.tile(self._believed(), (missing, 1))])

    def _believed(self) -> Floats:
        believed = np.power(1.0 - self._prior, np.arange(self.config.bins + 1, dtype=np.float64))
        believed[-1] = 0.0
        return believed

    def forget(self, account: int) -> None:
        """The account has changed hands: nothing was seen of its new tenant."""
        self._ended[account] = self._reached[account] = 0.0
        self.survival[account] = self._believed()

    def finished(self, account: int, generated: int, max_tokens: int) -> None:
        """A request ended by itself after ``generated`` of at most ``max_tokens`` tokens."""
        bins = self.config.bins
        share = min(bins - 1, generated * bins // max_tokens)
        keep = 1.0 - 1.0 / self.config.memory
        self._ended[account] *= keep
        self._reached[account] *= keep
        self._ended[account, share] += 1.0
        self._reached[account, : share + 1] += 1.0

    def refresh(self, accounts: NDArray[np.int32], generated: NDArray[np.int32], bound: NDArray[np.int32]) -> None:
        """Rebuild the curves from what finished and from what the live requests (arrays of one length) survived."""
        bins, weight = self.config.bins, self.config.prior_weight
        share = np.minimum(bins - 1, generated.astype(np.int64) * bins // bound)
        size = len(self.survival)
        reached = np.bincount(accounts * bins + share, minlength=size * bins).reshape(size, bins)
        # A live request has survived every bin before its own.
        survived = np.cumsum(reached[:, ::-1], axis=1)[:, ::-1] - reached
        hazard = (self._ended + weight * self._prior) / (self._reached + survived + weight)
        # Those that run to their bound end in the last bin: there the curve drops whatever the counts say.
        self.survival[:, 1:] = np.cumprod(1.0 - np.minimum(hazard, 1.0), axis=1)
        self.survival[:, bins] = 0.0

    def expected(
        self, accounts: NDArray[np.int32], generated: NDArray[np.int32], bound: NDArray[np.int32]
    ) -> NDArray[np.int64]:
        """Expected output in tokens of requests that generated ``generated`` so far: in (generated, bound]."""
        bins = self.config.bins
        start = np.minimum(bins - 1, generated.astype(np.int64) * bins // bound)
        tail = np.cumsum(self.survival[:, ::-1], axis=1)[:, ::-1]
        alive = np.maximum(self.survival[accounts, start], 1e-9)
        rest = tail[accounts, start] / alive * bound / bins
        total = np.rint(generated + rest).astype(np.int64)
        return np.asarray(np.clip(total, np.minimum(generated + 1, bound), bound), np.int64)
