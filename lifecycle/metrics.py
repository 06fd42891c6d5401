"""Prometheus metrics of a manager, in a registry of its own. Names follow the Prometheus conventions: base units,
``_total`` for counters. Labels: tenant and priority wherever an event belongs to a request; latencies, preemptions and
hits also have its input and output length class (prompt tokens and max_tokens).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvgate.lifecycle.manager import Manager
from kvgate.lifecycle.prefix.cache import PrefixCache
from kvgate.lifecycle.requests import Requests
from kvgate.lifecycle.states import Spec

_WHO = ("tenant", "priority")
_LENGTHS = ("input", "output")
_CLASSES = ((256, "up_to_256"), (2048, "up_to_2k"), (8192, "up_to_8k"))
_LONGEST = "over_8k"
_TOKEN_SECONDS = (0.005, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class ManagerMetrics:
    """An observer that counts. One per manager.

    Args:
        bytes_per_block: payload of a block, for swap bytes.
        known_tenants: values the tenant label may take; others are counted as "other", which bounds the label.
    """

    def __init__(self, bytes_per_block: int, known_tenants: frozenset[str] | None = None) -> None:
        self.registry = CollectorRegistry()
        self._bytes = bytes_per_block
        self._known = known_tenants
        self._requests = self._counter("requests", "Requests queued.", *_WHO)
        self._ended = self._counter("requests_ended", "Requests that ended, by end state.", *_WHO, "state")
        self._rejected = self._counter("requests_rejected", "Requests refused for good, by reason.", *_WHO, "reason")
        who = (*_WHO, *_LENGTHS)
        self._preempted = self._counter("preemptions", "Requests that gave up their pages, by way back.", *who, "way")
        self._hits = self._counter("prefix_hit_tokens", "Prompt tokens that another request had computed.", *who)
        self._own = self._counter("prefix_own_tokens", "Tokens a preempted request found of its own work.", *who)
        self._tokens = self._counter("tokens_computed", "Tokens computed, prompt and output.", *_WHO)
        self._again = self._counter("tokens_recomputed", "Tokens computed again after a preemption.", *_WHO)
        self._swap = self._counter("swap_bytes", "Bytes moved between device and host.", *_WHO, "direction")
        self._corrupt = self._counter("swap_corrupt", "Host copies that failed their checksum.", *_WHO)
        self._failures = self._counter("allocation_failures", "Requests for pages that could not be met.")
        text = "Planned rows whose pages were not there: the estimate of memory was wrong."
        self._misplanned = self._counter("memory_estimate_errors", text)
        self._overdue = self._counter("fence_overdue_pages", "Pages set aside: their launch did not signal in time.")
        self._orphans = self._counter("audit_orphan_pages", "Pages an audit found without an owner.")
        self._miscounted = Gauge(
            "kvgate_audit_miscounted_pages", "Pages with a wrong count in the last audit.", registry=self.registry
        )
        self._first = Histogram(
            "kvgate_request_first_token_seconds",
            "Time from arrival to the first token.",
            who,
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._between = Histogram(
            "kvgate_request_token_gap_seconds",
            "Time between two tokens of a request, waits after a preemption included.",
            who,
            buckets=_TOKEN_SECONDS,
            registry=self.registry,
        )
        self._duration = Histogram(
            "kvgate_request_duration_seconds",
            "Time from arrival to end.",
            _WHO,
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._recovery = Histogram(
            "kvgate_recovery_latency_seconds",
            "Time from preemption until the request runs again.",
            (*who, "way"),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._waiting = Gauge(
            "kvgate_longest_wait_rounds", "Rounds the last started request had waited.", _WHO, registry=self.registry
        )
        self._since: dict[str, tuple[float, str]] = {}
        self._last: dict[str, float] = {}
        self._manager: Manager | None = None

    def attach(self, manager: Manager, cache: PrefixCache | None = None) -> None:
        """Read the gauges from this manager (and its prefix cache) at every scrape."""
        self._manager = manager
        self.registry.register(_Gauges(manager, cache))

    def submitted(self, spec: Spec) -> None:
        """Count it."""
        self._requests.labels(*self._who(spec)).inc()

    def rejected(self, spec: Spec, reason: str) -> None:
        """Count it by reason."""
        self._rejected.labels(*self._who(spec), reason).inc()

    def started(self, spec: Spec, waited: int) -> None:
        """Note the wait, and the recovery latency of a preempted request."""
        self._waiting.labels(*self._who(spec)).set(waited)
        since = self._since.pop(spec.id, None)
        if since is not None and self._manager is not None:
            self._recovery.labels(*self._classes(spec), since[1]).observe(self._manager.clock() - since[0])

    def preempted(self, spec: Spec, way: str, blocks: int) -> None:
        """Count it, and the bytes that went out."""
        self._preempted.labels(*self._classes(spec), way).inc()
        if way == "swap":
            self._swap.labels(*self._who(spec), "out").inc(blocks * self._bytes)
        if self._manager is not None:
            self._since[spec.id] = (self._manager.clock(), way)

    def restored(self, spec: Spec, blocks: int) -> None:
        """Count the bytes that came back."""
        self._swap.labels(*self._who(spec), "in").inc(blocks * self._bytes)

    def corrupt(self, spec: Spec) -> None:
        """Count it."""
        self._corrupt.labels(*self._who(spec)).inc()

    def short_of_pages(self, blocks: int) -> None:
        """Count it."""
        self._failures.inc()

    def out_of_pages(self, rows: int) -> None:
        """Count it."""
        self._misplanned.inc(rows)

    def launch_overdue(self, pages: int) -> None:
        """Count the pages."""
        self._overdue.inc(pages)

    def audited(self, orphans: int, miscounted: int) -> None:
        """Count the orphans; show the miscounted ones."""
        self._orphans.inc(orphans)
        self._miscounted.set(miscounted)

    def reused(self, spec: Spec, tokens: int, *, own: bool) -> None:
        """Count the tokens as a hit, or as the request's own work."""
        (self._own if own else self._hits).labels(*self._classes(spec)).inc(tokens)

    def sampled(self, slots: NDArray[np.int64], requests: Requests) -> None:
        """Observe the time since each row's token before, or since its arrival."""
        if self._manager is None:
            return
        now = self._manager.clock()
        for slot in slots.tolist():
            spec = requests.spec(slot)
            last = self._last.get(spec.id)
            if last is None:
                self._first.labels(*self._classes(spec)).observe(now - float(requests.arrived[slot]))
            else:
                self._between.labels(*self._classes(spec)).observe(now - last)
            self._last[spec.id] = now

    def computed(
        self, slots: NDArray[np.int64], requests: Requests, tokens: NDArray[np.int32], again: NDArray[np.int32]
    ) -> None:
        """Add the round's tokens per tenant and priority."""
        groups: dict[tuple[str, str], list[int]] = {}
        for slot, made, repeated in zip(slots.tolist(), tokens.tolist(), again.tolist(), strict=True):
            sums = groups.setdefault(self._who(requests.spec(slot)), [0, 0])
            sums[0] += made
            sums[1] += repeated
        for who, (made, repeated) in groups.items():
            self._tokens.labels(*who).inc(made)
            self._again.labels(*who).inc(repeated)

    def ended(self, spec: Spec, state: str, seconds: float) -> None:
        """Count it and its duration."""
        self._since.pop(spec.id, None)
        self._last.pop(spec.id, None)
        self._ended.labels(*self._who(spec), state).inc()
        self._duration.labels(*self._who(spec)).observe(seconds)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"kvgate_{name}", text, labels, registry=self.registry)

    def _classes(self, spec: Spec) -> tuple[str, str, str, str]:
        return *self._who(spec), _length_class(spec.prompt_len), _length_class(spec.max_tokens)

    def _who(self, spec: Spec) -> tuple[str, str]:
        tenant = spec.tenant if self._known is None or spec.tenant in self._known else "other"
        return tenant, str(spec.priority)


def _length_class(tokens: int) -> str:
    return next((name for most, name in _CLASSES if tokens <= most), _LONGEST)


class _Gauges(Collector):
    """Read at scrape time, so they are never stale."""

    def __init__(self, manager: Manager, cache: PrefixCache | None) -> None:
        self._manager = manager
        self._cache = cache

    def collect(self) -> list[Metric]:
        """Current usage."""
        manager = self._manager
        store = manager.store
        text = "Blocks of the device pool, by what they can be used for."
        blocks = GaugeMetricFamily("kvgate_blocks", text, labels=("use",))
        for use, value in (
            ("total", store.total),
            ("available", store.available()),
            ("fenced", store.soon()),
            ("host_available", store.host_free()),
        ):
            blocks.add_metric((use,), value)
        tenants = manager.tenants
        families: list[Metric] = [blocks]
        for name, text, values in (
            ("kvgate_tenant_blocks", "Blocks a tenant's running requests hold.", tenants.blocks),
            ("kvgate_tenant_running_requests", "Requests of a tenant that run.", tenants.running),
            ("kvgate_tenant_queued_requests", "Requests of a tenant that wait.", tenants.queued),
        ):
            family = GaugeMetricFamily(name, text, labels=("tenant",))
            for tenant, value in zip(tenants.names, values.tolist(), strict=True):
                family.add_metric((tenant,), value)
            families.append(family)
        if self._cache is not None:
            families += _prefix(self._cache)
        return families


def _prefix(cache: PrefixCache) -> list[Metric]:
    events = CounterMetricFamily("kvgate_prefix_blocks", "Blocks of the prefix cache, by event.", labels=("event",))
    for event in ("looked_up", "hit", "found_again", "inserted", "evicted", "expired", "invalidated"):
        events.add_metric((event,), getattr(cache.counts, event))
    held = GaugeMetricFamily("kvgate_prefix_resident_blocks", "Blocks in the prefix cache.", labels=("state",))
    held.add_metric(("all",), len(cache))
    held.add_metric(("evictable",), cache.at_once)
    return [events, held]
