"""Whether a waiting request may start: pure decisions with a reason code each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvgate.lifecycle.config import AdmissionConfig, TenantConfig


class Outcome(Enum):
    """What happens to a request that asks to start."""

    ADMIT = "admit"
    QUEUE = "queue"
    DEGRADE = "degrade"
    REJECT = "reject"


class Reason(Enum):
    """Why; part of the metrics, so the values stay stable."""

    FITS = "fits"
    DEGRADED = "fits_under_gated_policy"
    NO_SLOT = "no_running_slot"
    NO_PAGES = "no_free_pages"
    FORECAST = "forecast_over_capacity"
    HELD = "line_held_for_head"
    CONCURRENCY = "tenant_concurrency"
    PAGE_QUOTA = "tenant_page_quota"
    TOKEN_BUDGET = "tenant_token_budget"
    IMPOSSIBLE = "larger_than_pool"
    QUOTA_IMPOSSIBLE = "larger_than_tenant_quota"
    UNKNOWN_TENANT = "unknown_tenant"
    DEADLINE = "deadline_passed"
    DUPLICATE = "duplicate_id"


@dataclass(frozen=True)
class Decision:
    """An outcome and its reason; ``detail`` is one line for people."""

    outcome: Outcome
    reason: Reason
    detail: str = ""


@dataclass(frozen=True)
class Offer:
    """A gated eviction policy that may be used instead of waiting, only inside its verdict's scope.

    Attributes:
        policy: name and parameters as in the canary config. budget: tokens kept per layer and kv head.
        longest: longest sequence the verdict covers, in tokens. model_version: the model it was measured on.
    """

    policy: str
    budget: int
    longest: int
    model_version: str

    def covers(self, tokens: int, model_version: str) -> bool:
        """Whether a request of at most ``tokens`` tokens lies inside the verdict's scope."""
        return tokens <= self.longest and model_version == self.model_version


@dataclass(frozen=True)
class Room:
    """What there is when a request asks: ``total`` and ``available`` blocks (free or evictable), ``running`` requests
    and the most there may be; ``tenant_running`` and ``tenant_blocks`` of the asking tenant."""

    total: int
    available: int
    running: int
    max_running: int
    tenant_running: int = 0
    tenant_blocks: int = 0


@dataclass(frozen=True)
class Ask:
    """What a waiting request needs: blocks ``now``, its level, and whether it is ``overdue``: it has waited so long
    after a preemption that it only needs to fit now."""

    now: int
    level: int
    overdue: bool = False


ADMIT = Decision(Outcome.ADMIT, Reason.FITS)


def at_arrival(bound: int, total: int, live_tokens: int, tokens: int, tenant: TenantConfig) -> Decision:
    """Reject what could never run: more blocks than the pool or the tenant's quota, or a spent token budget."""
    if bound > total:
        return Decision(Outcome.REJECT, Reason.IMPOSSIBLE, f"needs {bound} blocks, the pool has {total}")
    if tenant.page_quota is not None and bound > tenant.page_quota:
        detail = f"needs {bound} blocks, the tenant may hold {tenant.page_quota}"
        return Decision(Outcome.REJECT, Reason.QUOTA_IMPOSSIBLE, detail)
    if tenant.token_budget is not None and live_tokens + tokens > tenant.token_budget:
        detail = f"{tokens} tokens on top of {live_tokens} are over the budget of {tenant.token_budget}"
        return Decision(Outcome.REJECT, Reason.TOKEN_BUDGET, detail)
    return Decision(Outcome.QUEUE, Reason.FITS)


def watermark(level: int, total: int, config: AdmissionConfig) -> int:
    """Blocks that must stay free when a request of this level starts; the most urgent may use all but the reserve."""
    share = min(config.watermark_max, level * config.watermark_per_level)
    return int(total * (config.reserve + share))


def over_quota(ask: Ask, room: Room, tenant: TenantConfig) -> Decision | None:
    """The tenant limit that keeps a request waiting, if any; nobody else waits for it."""
    if tenant.max_concurrency is not None and room.tenant_running >= tenant.max_concurrency:
        return Decision(Outcome.QUEUE, Reason.CONCURRENCY, f"{room.tenant_running} of its requests run")
    if tenant.page_quota is not None and room.tenant_blocks + ask.now > tenant.page_quota:
        return Decision(Outcome.QUEUE, Reason.PAGE_QUOTA, f"its tenant holds {room.tenant_blocks} blocks")
    return None


def over_quota_later(peak: float, room: Room, tenant: TenantConfig) -> Decision | None:
    """Whether its tenant's expected demand with it (``peak`` blocks) is over the quota, if it has one and runs."""
    if tenant.page_quota is None or room.tenant_running == 0 or peak <= tenant.page_quota:
        return None
    return Decision(Outcome.QUEUE, Reason.PAGE_QUOTA, f"its tenant is expected to hold {peak:.0f} blocks")


def fits_now(ask: Ask, room: Room, config: AdmissionConfig) -> Decision:
    """Whether there is a running slot and enough blocks at this moment. An idle machine takes whatever fits at all."""
    if room.running >= room.max_running:
        return Decision(Outcome.QUEUE, Reason.NO_SLOT, f"{room.running} requests run")
    kept = 0 if room.running == 0 or ask.overdue else watermark(ask.level, room.total, config)
    if ask.now + kept > room.available:
        return Decision(Outcome.QUEUE, Reason.NO_PAGES, f"{ask.now} blocks and {kept} kept, {room.available} free")
    return ADMIT


def fits_later(ask: Ask, peak: float, room: Room, config: AdmissionConfig) -> Decision:
    """Whether the expected demand with this request (``peak`` blocks) stays within the pool."""
    if room.running == 0 or ask.overdue:
        return ADMIT
    limit = room.total - watermark(ask.level, room.total, config)
    if peak > limit:
        return Decision(Outcome.QUEUE, Reason.FORECAST, f"expected peak {peak:.0f} of {limit} blocks")
    return ADMIT
