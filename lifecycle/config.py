"""The manager's settings: frozen dataclasses read from YAML; an unknown key is an error naming it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar

from kvgate import strict_yaml
from kvgate.typed import STRICT, parse, read_text

LARGEST = 1 << 18  # bytes of a settings file
MOST = 1e12  # of any number; what is allocated by has limits of its own
LIMITS: Mapping[str, tuple[int, float]] = {
    "page_size": (1, 4096),
    "tokens_per_step": (1, 1 << 24),
    "max_running": (1, 1 << 20),
    "aging_rounds": (1, MOST),
    "admission.lifted_share": (0, 1),
    "admission.points": (1, 4096),
    "admission.forecast_rounds": (1, MOST),
    "estimator.bins": (1, 4096),
    "estimator.refresh_rounds": (1, MOST),
    "recovery.host_blocks": (0, 1 << 24),
    "fair.window": (1, 1 << 20),
}
"""Least and most of settings, by name; others are from 0 to :data:`MOST`."""


@dataclass(frozen=True)
class AdmissionConfig:
    """When a waiting request may start. Fractions are of the whole pool, rounds are scheduling steps.

    Attributes:
        reserve: emergency reserve that only running requests may grow into.
        watermark_per_level: extra pages kept free of a request for each priority level under the most urgent (0).
        watermark_max: the most that watermark may reach.
        z: standard deviations added to the expected demand (0: plan with the mean), z_without_host: the same where
            there is no host area: a preemption then costs computation.
        points: points of the demand forecast. forecast_rounds: rounds between two rebuilds of it.
        max_bypass: requests that may start before a head that does not fit, then the line is held for it.
        bypass_reach: how far behind the heads of the line to look for one that fits.
        lifted_share: of the pool, that requests lifted by waiting may hold together while more urgent ones wait.
        resume_rounds: rounds after which a preempted request only needs to fit now, whatever the forecast says.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = STRICT

    reserve: float = 0.01
    watermark_per_level: float = 0.01
    watermark_max: float = 0.04
    z: float = 0.0
    z_without_host: float = 1.25
    points: int = 32
    forecast_rounds: int = 4
    max_bypass: int = 64
    bypass_reach: int = 16
    lifted_share: float = 0.25
    resume_rounds: int = 400


@dataclass(frozen=True)
class EstimatorConfig:
    """The learning of output lengths (see estimator.py).

    Attributes:
        bins: resolution of the used share of max_tokens.
        prior_mean: mean share before anything was seen, and prior_weight: how many requests that belief counts as.
        memory: finished requests remembered. refresh_rounds: rounds between two updates.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = STRICT

    bins: int = 64
    prior_mean: float = 0.28
    prior_weight: float = 4.0
    memory: float = 400.0
    refresh_rounds: int = 16


@dataclass(frozen=True)
class PreemptionConfig:
    """Weights of the victim score (see preemption.py); each factor is scaled to [0, 1] first.

    Attributes:
        priority: for being less urgent.
        reclaimable: for whole pages that would really come free.
        recompute: against tokens to compute again.
        progress: against being close to the expected end.
        waiting: against having waited before (aging).
        deadline: against a close deadline.
        max_preemptions: after so many a request is no victim while another can be found.
        protect_rounds: turn of a request that waiting has lifted: so long nobody more urgent takes its pages.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = STRICT

    priority: float = 4.0
    reclaimable: float = 0.5
    recompute: float = 1.0
    progress: float = 1.0
    waiting: float = 0.5
    deadline: float = 1.0
    max_preemptions: int = 3
    protect_rounds: int = 8


@dataclass(frozen=True)
class RecoveryConfig:
    """Costs for swap against recompute (see recovery.py). Rates are measured by the engine and passed in.

    Attributes:
        out_bytes_per_s, in_bytes_per_s: link bandwidth device to host and back.
        prefill_tokens_per_s: linear part of prefill speed.
        prefill_quadratic_s: seconds per token squared (attention).
        bytes_per_block: payload of one block over all layers and kv heads.
        host_blocks: blocks the host area can hold; 0 switches swapping off.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = STRICT

    out_bytes_per_s: float = 8e9
    in_bytes_per_s: float = 8e9
    prefill_tokens_per_s: float = 1200.0
    prefill_quadratic_s: float = 0.0
    bytes_per_block: int = 368_640
    host_blocks: int = 0


@dataclass(frozen=True)
class TenantConfig:
    """What one tenant may use. None means no limit of its own.

    Attributes:
        weight: share of service against the others (fair queueing).
        max_concurrency: requests running at once.
        token_budget: tokens (prompt and output bound) queued and running at once.
        page_quota: blocks held at once.
        priority_cap: the most urgent priority it may ask for; more urgent requests are served at the cap.
        min_share: fraction of recent service below which it goes first while it has requests waiting.
        degrade: it accepts a gated eviction policy instead of waiting.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = STRICT

    weight: float = 1.0
    max_concurrency: int | None = None
    token_budget: int | None = None
    page_quota: int | None = None
    priority_cap: int = 0
    min_share: float = 0.0
    degrade: bool = False


@dataclass(frozen=True)
class FairConfig:
    """Virtual token counters (see tenants.py). ``window`` is the rounds over which min_share is measured."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = STRICT

    prompt_weight: float = 1.0
    output_weight: float = 2.0
    window: int = 256


@dataclass(frozen=True)
class ManagerConfig:
    """One configuration for every workload.

    Attributes:
        page_size: tokens of one block.
        tokens_per_step: most tokens computed in a scheduling round.
        max_running: most requests running at once.
        aging_rounds: waiting this long lifts a request by one priority level.
        fence_timeout: clock time after which a round's fence whose signal never came is given up, and after which
            nobody waits any longer for pages behind any other fence.
        audit_rounds: rounds between two audits; one more whenever nothing moves although requests wait. 0: never.
        tenants: by name; the entry "default" serves every other name, without it unknown tenants are refused.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = STRICT

    page_size: int = 16
    tokens_per_step: int = 2048
    max_running: int = 256
    aging_rounds: int = 100
    fence_timeout: float = 30.0
    audit_rounds: int = 1024
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    estimator: EstimatorConfig = field(default_factory=EstimatorConfig)
    preemption: PreemptionConfig = field(default_factory=PreemptionConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    fair: FairConfig = field(default_factory=FairConfig)
    tenants: dict[str, TenantConfig] = field(default_factory=lambda: {"default": TenantConfig()})

    @property
    def z(self) -> float:
        """Standard deviations to plan with."""
        return self.admission.z if self.recovery.host_blocks else self.admission.z_without_host


def validate(config: ManagerConfig) -> ManagerConfig:
    """Refuse settings that cannot work: ValueError naming the field, its value and the remedy."""
    for name, value in _numbers(config):
        least, most = LIMITS.get(name, (0, MOST))
        if not least <= value <= most:
            raise ValueError(f"{name} is {value:g}, needs {least} to {most:g}")
    shares = sum(t.min_share for t in config.tenants.values())
    if shares > 1.0:
        raise ValueError(f"tenants: min_share adds up to {shares:g}, needs at most 1; lower some")
    for name, tenant in config.tenants.items():
        if tenant.weight <= 0:
            raise ValueError(f"tenants.{name}.weight is {tenant.weight:g}, needs more than 0")
    reserve = config.admission.reserve + config.admission.watermark_max
    if reserve >= 1.0:
        raise ValueError(f"admission: reserve + watermark_max is {reserve:g} of the pool, needs under 1")
    return config


def _numbers(settings: Any, inside: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a configuration, by the name it has in YAML."""
    for spec in fields(settings):
        value = getattr(settings, spec.name)
        inner = value.items() if isinstance(value, dict) else [("", value)]
        for key, entry in inner:
            name = f"{inside}{spec.name}{f'.{key}' if key else ''}"
            if is_dataclass(entry):
                yield from _numbers(entry, f"{name}.")
            elif isinstance(entry, int | float) and not isinstance(entry, bool):
                yield name, entry


def parse_config(raw: Any, where: str = "config") -> ManagerConfig:
    """Settings from plain YAML data; nothing at all means the defaults, also for a tenant that is only named.

    Raises ValueError naming an unknown key or a wrong value.
    """
    given = {} if raw is None else raw
    if isinstance(given, dict) and isinstance(given.get("tenants"), dict):
        given = {**given, "tenants": {name: {} if own is None else own for name, own in given["tenants"].items()}}
    try:
        return validate(parse(ManagerConfig, given, where))
    except ValueError as error:
        raise ValueError(str(error) if str(error).startswith(where) else f"{where}: {error}") from error


def load_config(path: Path) -> ManagerConfig:
    """Settings from a YAML file. Raises ValueError in one line where it cannot be read."""
    return parse_config(strict_yaml.load(read_text(path, LARGEST), str(path)), path.name)
