"""Tenants: quotas, and fair queueing by virtual token counters.

The fair queue is VTC (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): a tenant's counter grows
by the weighted tokens it was served, divided by its weight; the waiting tenant with the lowest counter goes first; a
tenant that was idle is lifted to the lowest counter among the active ones, so idling earns no credit.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvgate.lifecycle.config import FairConfig, TenantConfig

DEFAULT = "default"
_MOST_IDLE = 256
_NO_QUOTA = np.iinfo(np.int64).max


class Tenants:
    """Accounts of all tenants seen so far.

    Attributes:
        names: name of each account.
        counter: fp64 ``[accounts]``, virtual tokens served.
        recent: fp64 ``[accounts]``, tokens served lately (exponential window).
        running, queued: int64 ``[accounts]``, requests in these states.
        tokens: int64 ``[accounts]``, prompt plus output bound of all live requests.
        blocks: int64 ``[accounts]``, blocks held on the device. page_quota: the most it may hold.
    """

    def __init__(self, config: dict[str, TenantConfig], fair: FairConfig) -> None:
        self._configured = config
        self._fair = fair
        self.names: list[str] = []
        self.configs: list[TenantConfig] = []
        self._index: dict[str, int] = {}
        self._idle: dict[int, None] = {}  # accounts without requests that only "default" serves, longest idle first
        self.counter = np.zeros(0)
        self.recent = np.zeros(0)
        self._weight = np.zeros(0)
        self._min_share = np.zeros(0)
        self.running = np.zeros(0, np.int64)
        self.queued = np.zeros(0, np.int64)
        self.tokens = np.zeros(0, np.int64)
        self.blocks = np.zeros(0, np.int64)
        self.page_quota = np.zeros(0, np.int64)

    def limits(self, name: str) -> TenantConfig:
        """A tenant's limits. Raises ValueError where neither it nor "default" is configured. Keeps nothing."""
        config = self._configured.get(name, self._configured.get(DEFAULT))
        if config is None:
            known = ", ".join(sorted(self._configured)) or "none"
            raise ValueError(f"tenant {name!r} is unknown; configured: {known}")
        return config

    def knows(self, name: str) -> bool:
        """Whether the tenant has an account."""
        return name in self._index

    def spent(self, name: str) -> int:
        """Tokens of the tenant's live requests."""
        at = self._index.get(name)
        return 0 if at is None else int(self.tokens[at])

    def account(self, name: str, busy: Callable[[int], bool] = lambda account: False) -> int:
        """Index of a tenant, opened if it has none. Raises ValueError as :meth:`limits` does.

        Names that only "default" serves are not remembered for ever: beyond ``_MOST_IDLE`` of them without requests,
        the account idle for longest changes hands, unless it is still ``busy`` (pages are charged to it).
        """
        if name in self._index:
            return self._index[name]
        config = self.limits(name)
        if len(self._idle) > _MOST_IDLE:
            old = next((a for a in self._idle if not busy(a)), None)
            if old is not None:
                return self._hand_over(old, name)
        self._index[name] = len(self.names)
        self.names.append(name)
        self.configs.append(config)
        for field in (
            "counter",
            "recent",
            "_weight",
            "_min_share",
            "running",
            "queued",
            "tokens",
            "blocks",
            "page_quota",
        ):
            setattr(self, field, np.append(getattr(self, field), np.zeros(1, getattr(self, field).dtype)))
        self._weight[-1] = config.weight
        self._min_share[-1] = config.min_share
        self.page_quota[-1] = _NO_QUOTA if config.page_quota is None else config.page_quota
        return len(self.names) - 1

    def _hand_over(self, account: int, name: str) -> int:
        del self._idle[account], self._index[self.names[account]]
        self._index[name], self.names[account] = account, name
        self.counter[account] = self.recent[account] = 0.0
        return account

    def arrived(self, account: int, tokens: int) -> None:
        """A request joins; a tenant that was idle is lifted to the lowest active counter."""
        active = (self.queued + self.running) > 0
        if not active[account] and active.any():
            self.counter[account] = max(self.counter[account], float(self.counter[active].min()))
        self.queued[account] += 1
        self.tokens[account] += tokens
        self._idle.pop(account, None)

    def left(self, account: int, tokens: int, *, running: bool) -> None:
        """A live request ended, from the running set or from the queue."""
        (self.running if running else self.queued)[account] -= 1
        self.tokens[account] -= tokens
        assert self.running[account] >= 0, "tenant account went negative"
        assert self.queued[account] >= 0, "tenant account went negative"
        if self.running[account] + self.queued[account] == 0 and self.names[account] not in self._configured:
            self._idle[account] = None

    def started(self, account: int, blocks: int, prompt: int) -> None:
        """A waiting request runs; ``prompt`` tokens are charged (0 when it resumes)."""
        self.queued[account] -= 1
        self.running[account] += 1
        self.blocks[account] += blocks
        self.counter[account] += prompt * self._fair.prompt_weight / self._weight[account]

    def stopped(self, account: int) -> None:
        """A running request waits again (preempted or swapped out)."""
        self.running[account] -= 1
        self.queued[account] += 1

    def served(self, accounts: NDArray[np.int32], tokens: NDArray[np.int32], outputs: NDArray[np.bool_]) -> None:
        """Charge one round: ``tokens`` computed per row, ``outputs`` where a row produced an output token."""
        size = len(self.names)
        made = np.bincount(accounts, weights=outputs, minlength=size)
        self.counter += made * self._fair.output_weight / self._weight
        self.recent *= 1.0 - 1.0 / self._fair.window
        self.recent += np.bincount(accounts, weights=tokens, minlength=size)

    def under_share(self) -> NDArray[np.bool_]:
        """Tenants below their minimum share of recent service, bool ``[accounts]``."""
        total = float(self.recent.sum())
        under: NDArray[np.bool_] = self.recent < self._min_share * total
        return under
