"""What a policy must show before it may be enabled: margins, floors and minimum numbers, read from YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from kvgate import strict_yaml
from kvgate.evals.data.items import digest
from kvgate.evals.judge.columns import SliceKey
from kvgate.typed import STRICT, is_file, parse, read_text

Grouping = tuple[SliceKey, ...]

LARGEST = 1 << 18  # bytes of a gate's file
Count = Annotated[int, Field(le=10**12)]


@dataclass(frozen=True)
class SuiteRule:
    """What one suite asks instead of the gate's own numbers, and why."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = STRICT

    reason: str
    m_suite: float | None = None
    m_slice: float | None = None
    floor: float | None = None


@dataclass(frozen=True)
class Gate:
    """A bar that a policy must clear.

    Attributes:
        m_suite, m_slice: largest loss of mean score that is accepted in a suite, and in each of its slices.
        alpha: chance of enabling a policy that loses a margin or more, and of blocking one that loses less than all.
        floor: the exact run's mean score must be at least this, with ``floor_confidence`` (one-sided); where it is not,
            nothing can be concluded about a policy.
        min_items, min_clusters: least evidence for a suite; ``min_slice_clusters`` for a slice. With less the exact
            run's competence cannot be judged either, so the stratum stays open.
        slice_by: what tells slices of a suite apart: keys that are crossed, or several such groupings, each judged by
            itself. Depths are put into ``depth_bins`` equal bins of [0, 1]. A key without a value tells nothing apart.
        slice_alarm, alarm_clusters: a policy is not enabled if any (length, depth) group or any task of at least
            ``alarm_clusters`` clusters lost ``slice_alarm`` or more of its mean score, whatever the slices say. This
            only ever withholds, so it needs no error rate.
        memory_tolerance: share of the exact run's bytes by which a row may hold more than its budget's whole pages.
        length_drift: largest relative difference of output lengths, policy against exact run, in each suite.
        max_excluded: a suite is not evaluable once more than this share of its slices is not.
        shadow_only: an enabled policy may only shadow traffic; ``canary_fraction``: largest share of traffic otherwise.
        suites: rules of single suites.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = STRICT

    name: Annotated[str, Field(min_length=1, max_length=200)]
    m_suite: float
    m_slice: float
    alpha: float = 0.05
    floor: float = 0.6
    floor_confidence: float = 0.95
    min_items: Count = 250
    min_clusters: Count = 100
    min_slice_clusters: Count = 30
    slice_by: Grouping | tuple[Grouping, ...] = ("task", "length", "depth")
    depth_bins: Count = 5
    slice_alarm: float = 0.5
    alarm_clusters: Count = 3
    memory_tolerance: float = 0.05
    length_drift: float = 0.1
    max_excluded: float = 0.5
    shadow_only: bool = False
    canary_fraction: float = 0.05
    suites: Mapping[str, SuiteRule] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_fractions(self)
        _check_counts(self)
        _check_margins(self, self.m_suite, self.m_slice, self.floor, "")
        for suite, rule in self.suites.items():
            if not rule.reason.strip():
                raise ValueError(f"gate {self.name}: suites.{suite}.reason is empty; say why the suite differs")
            _check_margins(self, *self._numbers(suite), f"suites.{suite}.")

    @property
    def groupings(self) -> tuple[Grouping, ...]:
        """Every way in which slices are cut, in order."""
        if all(isinstance(entry, str) for entry in self.slice_by):
            return (self.slice_by,) if self.slice_by else ()  # type: ignore[return-value]
        return tuple(entry if isinstance(entry, tuple) else (entry,) for entry in self.slice_by)

    @property
    def content_hash(self) -> str:
        """BLAKE2b-128 over every rule but the name."""
        return digest({key: value for key, value in asdict(self).items() if key != "name"})

    @property
    def shipped(self) -> bool:
        """Whether a gate of this name and content comes with kvgate."""
        return self.name in gate_names() and _shipped(self.name).content_hash == self.content_hash

    def m_suite_of(self, suite: str) -> float:
        """Accepted loss of a suite."""
        return self._numbers(suite)[0]

    def m_slice_of(self, suite: str) -> float:
        """Accepted loss of each slice of a suite."""
        return self._numbers(suite)[1]

    def floor_of(self, suite: str) -> float:
        """Competence floor of a suite."""
        return self._numbers(suite)[2]

    def _numbers(self, suite: str) -> tuple[float, float, float]:
        rule = self.suites.get(suite) or SuiteRule("none")
        own = (self.m_suite, self.m_slice, self.floor)
        values = (rule.m_suite, rule.m_slice, rule.floor)
        m_suite, m_slice, floor = (mine if value is None else value for value, mine in zip(values, own, strict=True))
        return m_suite, m_slice, floor

    def depth_bin(self, depth: float | None) -> str | None:
        """Name of the bin a depth falls into: "0.2-0.4" with five bins."""
        if depth is None:
            return None
        index = min(max(int(depth * self.depth_bins), 0), self.depth_bins - 1)
        return f"{index / self.depth_bins:.3g}-{(index + 1) / self.depth_bins:.3g}"


def gate_names() -> list[str]:
    """Gates shipped with kvgate."""
    folder = files("kvgate") / "configs" / "gates"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def load_gate(name_or_path: str | Path) -> Gate:
    """A gate by name, or from a YAML file. Raises ValueError naming the field, its value and what to do."""
    path = Path(name_or_path)
    if path.suffix in {".yaml", ".yml"}:
        if not is_file(path):
            raise ValueError(f"gate {str(path)!r:.200}: no such file; those of kvgate: {', '.join(gate_names())}")
        gate = parse_gate(read_text(path, LARGEST, "gate"), path.stem)
        if gate.name in gate_names() and not gate.shipped:
            raise ValueError(
                f"gate {path}: its name is {gate.name}, but its rules are not those of the gate {gate.name} that comes "
                "with kvgate; give it a name of its own"
            )
        return gate
    if str(name_or_path) not in gate_names():
        known = ", ".join(gate_names())
        raise ValueError(f"gate {str(name_or_path)!r:.200}: unknown; use one of {known} or a .yaml file")
    return _shipped(str(name_or_path))


def _shipped(name: str) -> Gate:
    text = (files("kvgate") / "configs" / "gates" / f"{name}.yaml").read_text(encoding="utf-8")
    return parse_gate(text, name)


def parse_gate(text: str, source: str) -> Gate:
    """A gate from YAML text; ``source`` names it in errors. ValueError names the field, its value and what to do."""
    where = f"gate {source}"
    raw = strict_yaml.load(text, where)
    if isinstance(raw, dict):
        for missing in ("m_suite", "m_slice"):
            if missing not in raw and set(raw) <= {spec.name for spec in fields(Gate)}:
                raise ValueError(f"{where}: {missing} is missing; give the largest loss you accept, for example 0.03")
        raw = {"name": source, **raw, "suites": {} if raw.get("suites") is None else raw["suites"]} if raw else raw
    try:
        gate = parse(Gate, raw, where)
    except ValueError as error:
        # What the gate itself refuses names it already.
        raise ValueError(str(error).removeprefix(f"{where}: ") if ": gate " in str(error) else str(error)) from error
    for keys in gate.groupings:
        if len(set(keys)) != len(keys):
            raise ValueError(f"{where}: slice_by is {gate.slice_by!r}; list each key once")
    return gate


def _check_fractions(gate: Gate) -> None:
    sound = {
        "alpha": (0.0 < gate.alpha <= 0.2, "a chance of error above 0 and at most 0.2, usually 0.05"),
        "floor_confidence": (0.5 < gate.floor_confidence < 1.0, "a confidence above 0.5 and below 1, usually 0.95"),
        "slice_alarm": (0.0 < gate.slice_alarm <= 1.0, "a loss above 0 and at most 1"),
        "memory_tolerance": (0.0 <= gate.memory_tolerance < 1.0, "a share of at least 0 and below 1, usually 0.05"),
        "length_drift": (0.0 < gate.length_drift < 1.0, "a relative difference above 0 and below 1, usually 0.1"),
        "max_excluded": (0.0 <= gate.max_excluded < 1.0, "a share of at least 0 and below 1"),
        "canary_fraction": (0.0 <= gate.canary_fraction < 1.0, "a share of at least 0 and below 1"),
    }
    for name, (fine, remedy) in sound.items():
        if not fine:
            raise ValueError(f"gate {gate.name}: {name} is {getattr(gate, name)}; give {remedy}")


def _check_counts(gate: Gate) -> None:
    for name in ("min_items", "min_clusters", "min_slice_clusters", "depth_bins", "alarm_clusters"):
        if getattr(gate, name) < 1:
            raise ValueError(f"gate {gate.name}: {name} is {getattr(gate, name)}; give at least 1")
    if gate.shadow_only and gate.canary_fraction > 0.0:
        raise ValueError(
            f"gate {gate.name}: canary_fraction is {gate.canary_fraction} although shadow_only is true; set it to 0"
        )


def _check_margins(gate: Gate, m_suite: float, m_slice: float, floor: float, where: str) -> None:
    start = f"gate {gate.name}: {where}"
    if not 0.0 < m_suite < 1.0:
        raise ValueError(f"{start}m_suite is {m_suite}; give an accepted loss above 0 and below 1, for example 0.03")
    if not m_suite <= m_slice < 1.0:
        raise ValueError(
            f"{start}m_slice is {m_slice}; it must be at least m_suite ({m_suite}) and below 1, since a slice has "
            "fewer items than its suite"
        )
    if not 0.0 < floor < 1.0:
        raise ValueError(f"{start}floor is {floor}; give a mean score above 0 and below 1, usually 0.6")
    if m_slice >= floor:
        raise ValueError(
            f"{start}m_slice is {m_slice}, not below the floor of {floor}: a policy that gets nothing right could "
            "pass; lower the margin or raise the floor"
        )
