"""The small files of a results folder, checked: ``run.json``, ``checks.json`` and ``stop.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import Field

from kvgate.evals.log.records import SCHEMA_VERSION, Count, Name, Scalar
from kvgate.typed import STRICT, parse

Hash = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
Plain = Mapping[str, Any]
Kind = TypeVar("Kind")


@dataclass(frozen=True)
class ColumnRecord:
    """A row of the leaderboard to be, as the plan asks for it; ``request``: tokens or ratio, None for the exact run."""

    __pydantic_config__: ClassVar[Plain] = STRICT

    label: Name
    policy: Name
    settings: Mapping[Name, Scalar | tuple[Scalar, ...]]
    request: int | float | None
    oracle: bool


@dataclass(frozen=True)
class ModelRecord:
    """What of a model the readers of a run use; the engine writes more."""

    __pydantic_config__: ClassVar[Plain] = {**STRICT, "extra": "ignore"}

    name: Name
    revision: Name
    weights_hash: Name
    dtype: Name


@dataclass(frozen=True)
class Origin:
    """Where a run was made; see :mod:`kvgate.evals.run.provenance`."""

    __pydantic_config__: ClassVar[Plain] = STRICT

    kvgate: Name
    code_hash: Hash
    git: Plain
    python: Name
    packages: Mapping[Name, Name]
    model: ModelRecord
    machine: Plain
    reading_code_hash: Hash | None = None


@dataclass(frozen=True)
class SuiteRecord:
    """What of a plan's suite every reader relies on; the plan's own reader checks the rest."""

    __pydantic_config__: ClassVar[Plain] = {**STRICT, "extra": "allow"}

    name: Name
    options: Plain = field(default_factory=dict)


@dataclass(frozen=True)
class PlanRecord:
    """What of a plan every reader relies on; :func:`kvgate.evals.plan.config.parse_plan` checks the rest."""

    __pydantic_config__: ClassVar[Plain] = {**STRICT, "extra": "allow"}

    name: Name
    gate: Name
    suites: Annotated[tuple[SuiteRecord, ...], Field(min_length=1)]
    policies: tuple[Plain, ...]


@dataclass(frozen=True)
class Manifest:
    """``run.json``.

    Attributes:
        identity: what decides the outcome besides the plan; ``config_hash`` is of plan, items and identity.
        items: how many; ``items_hash``: of their hashes in the order drawn for the run; ``order``: a hash after every
            round, so that a look finds whether it sees the first ones. ``columns``: the exact run and every policy.
    """

    __pydantic_config__: ClassVar[Plain] = STRICT

    plan: PlanRecord
    config_hash: Hash
    items: Annotated[int, Field(ge=1, lt=1 << 53)]
    provenance: Origin
    identity: Plain = field(default_factory=dict)
    items_hash: Hash | None = None
    order: tuple[Hash, ...] = ()
    columns: tuple[ColumnRecord, ...] = ()
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True)
class Counted:
    """Cells that were repeated, and those of them that came out differently."""

    __pydantic_config__: ClassVar[Plain] = STRICT

    cells: Count
    different: Count


@dataclass(frozen=True)
class Checks:
    """``checks.json``; see :mod:`kvgate.evals.run.self_checks`."""

    __pydantic_config__: ClassVar[Plain] = STRICT

    units: tuple[Count, ...]
    repeat: Mapping[Name, Counted]
    batch_invariance: Counted
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True)
class StopRecord:
    """``stop.json``; see :class:`kvgate.evals.run.early_stopping.Stop`."""

    __pydantic_config__: ClassVar[Plain] = STRICT

    rule: Name
    reason: Name
    items: Count
    planned: Count
    looks: Count
    open: tuple[Name, ...]
    deterministic: bool
    schema_version: int = SCHEMA_VERSION


def check_manifest(raw: Any, where: str) -> Manifest:
    """``run.json`` from plain data. ValueError of one line names what is wrong, or another version."""
    return _checked(Manifest, raw, where)


def check_checks(raw: Any, where: str) -> Checks:
    """``checks.json``, likewise."""
    return _checked(Checks, raw, where)


def check_stop(raw: Any, where: str) -> StopRecord:
    """``stop.json``, likewise."""
    return _checked(StopRecord, raw, where)


def _checked(kind: type[Kind], raw: Any, where: str) -> Kind:
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"{where}: schema_version {version!r:.40}, this kvgate reads {SCHEMA_VERSION}; run the plan again"
        )
    return parse(kind, raw, where)
