"""Prometheus metrics of the server beside the manager's own: times by arm, comparisons, and the rollout's state."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvgate.lifecycle.states import State
from kvgate.serving.canary.progress import Progress
from kvgate.serving.driver import Job

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_NATS = (1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
STATES = ("shadow", "canary", "full", "rolled_back")


class ArmMetrics:
    """Requests by how they were answered: exact, shadow (exact, compared) or canary."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._ended = Counter("kvgate_answers", "Answers that ended.", ("arm", "state"), registry=registry)
        self._first = Histogram(
            "kvgate_answer_first_token_seconds",
            "Arrival to first token.",
            ("arm",),
            buckets=_SECONDS,
            registry=registry,
        )
        self._gap = Histogram(
            "kvgate_answer_longest_gap_seconds",
            "Longest gap between two tokens of an answer.",
            ("arm",),
            buckets=_SECONDS,
            registry=registry,
        )
        self._compared = Counter(
            "kvgate_compared_tokens", "Tokens compared, by agreement.", ("agreed",), registry=registry
        )
        self._lost = Counter("kvgate_lost_comparisons", "Comparisons given up.", registry=registry)
        self._kl = Histogram(
            "kvgate_compared_kl_nats", "Mean KL divergence of an answer.", buckets=_NATS, registry=registry
        )

    def ended(self, arm: str, job: Job) -> None:
        """An answer has ended."""
        state = job.served.state if job.served is not None else State.FAILED
        self._ended.labels(arm, state.name.lower()).inc()
        if job.first is not None:
            self._first.labels(arm).observe(job.first - job.arrived)
            if job.longest_gap > 0:
                self._gap.labels(arm).observe(job.longest_gap)
        found = job.compared
        if found is None:
            return
        if found.missing is not None:
            self._lost.inc()
            return
        self._compared.labels("yes").inc(found.agreed)
        self._compared.labels("no").inc(found.tokens - found.agreed)
        self._kl.observe(found.kl_mean)


class CanaryMetrics(Collector):
    """The rollout, read at scrape time."""

    def __init__(self, progress: Progress, label: str) -> None:
        self._progress = progress
        self._label = label

    def collect(self) -> Iterable[Metric]:
        """Current values."""
        progress, labels = self._progress, ["policy"]
        state = GaugeMetricFamily(
            "kvgate_canary_state", "1 for the state the rollout is in.", labels=["policy", "state"]
        )
        for name in STATES:
            state.add_metric([self._label, name], float(progress.state == name))
        yield state
        lower, upper = progress.streams["quality"].bounds(progress.judge.alpha)
        for name, text, value in (
            ("traffic_ratio", "Share of in-scope conversations under the policy.", progress.traffic),
            ("pairs", "Conversations compared in this state.", float(progress.pairs)),
            ("exposed_requests", "Requests answered under the policy.", float(progress.exposed)),
            ("paused", "1 while missing data keep the rollout where it is.", float(progress.paused() is not None)),
            ("quality_difference_lower", "Lower limit of the mean difference, policy minus exact.", lower),
            ("quality_difference", "Mean difference of quality, policy minus exact.", progress.streams["quality"].mean),
            ("quality_difference_upper", "Upper limit of the mean difference.", upper),
            ("quality_margin", "Loss that is accepted.", progress.judge.margin),
        ):
            family = GaugeMetricFamily(f"kvgate_canary_{name}", text, labels=labels)
            family.add_metric([self._label], value)
            yield family
        yield from self._guards()

    def _guards(self) -> Iterable[Metric]:
        text = "Policy arm minus exact arm, a mean over conversations"
        labels = ["policy", "guard"]
        families = {
            name: GaugeMetricFamily(f"kvgate_canary_guard_{name}", about, labels=labels)
            for name, about in (
                ("difference", f"{text}."),
                ("difference_lower", f"{text}: lower limit."),
                ("difference_upper", f"{text}: upper limit."),
                ("limit", "Largest difference that is accepted."),
            )
        }
        for name, stream in self._progress.streams.items():
            if name.startswith("quality"):
                continue
            lower, upper = stream.bounds(self._progress.judge.alpha)
            values = {"difference": -stream.mean, "difference_lower": -upper, "difference_upper": -lower}
            for kind, value in {**values, "limit": stream.margin}.items():
                families[kind].add_metric([self._label, name], value)
        return families.values()
