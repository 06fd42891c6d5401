"""Run plans: YAML in, a checked :class:`RunConfig` out. An unknown key is an error that names it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_type_hints

from pydantic import Field, PlainValidator

from kvgate import strict_yaml
from kvgate.compressors.catalog import check_parameters, parameters, policy_class
from kvgate.evals.data.items import Protocol
from kvgate.evals.data.tokens import DEFAULT_DATE
from kvgate.typed import STRICT, is_file, parse, read_text

LARGEST_YAML = 1 << 18  # bytes: reading YAML takes seconds a megabyte
MOST_TOKENS = 1 << 24  # of a context, a budget, a chunk
MOST_ITEMS = 1_000_000  # of a task at one length


def check_budget(budget: Any) -> int | float:
    """An integer of at least 1, or a ratio in (0, 1]. ValueError for anything else."""
    number = isinstance(budget, int | float) and not isinstance(budget, bool)
    if number and isinstance(budget, int) and 1 <= budget <= MOST_TOKENS:
        return budget
    if number and isinstance(budget, float) and math.isfinite(budget) and 0 < budget <= 1:
        return float(budget)
    raise ValueError(
        f"budget {repr(budget)[:60]}; give whole tokens from 1 to {MOST_TOKENS}, or a ratio above 0 and at most 1.0"
    )


Budget = Annotated[int | float, PlainValidator(check_budget)]
"""Tokens per (layer, kv head), or a ratio in (0, 1] of the tokens there are when eviction happens."""

Text = Annotated[str, Field(min_length=1, max_length=4096)]
Setting = bool | int | float | str | None
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]


@dataclass(frozen=True)
class PolicyChoice:
    """A policy with its parameters, at several budgets.

    ``policy``: catalog name or ``module:Class``. ``oracle`` marks a policy that is known to read what a policy may
    not, for comparison only: its rows are invalid.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = STRICT

    policy: Text
    budgets: Annotated[tuple[Budget, ...], Field(min_length=1, max_length=256)]
    params: Mapping[str, Setting | tuple[Setting, ...]] = field(default_factory=dict)
    oracle: bool = False


@dataclass(frozen=True)
class SuiteChoice:
    """A suite and how much of it.

    ``counts``: nominal context length -> items a task. Empty ``counts``, ``depths`` and ``tasks`` mean the suite's own.
    ``protocol``: "whole_prompt" evicts with the question in the prompt; None is each item's own.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = STRICT

    name: Text
    counts: Annotated[Mapping[Tokens, Annotated[int, Field(ge=0, le=MOST_ITEMS)]], Field(max_length=1000)] = field(
        default_factory=dict
    )
    depths: Annotated[tuple[Annotated[float, Field(ge=0, le=1)], ...], Field(max_length=1000)] = ()
    tasks: Annotated[tuple[Text, ...], Field(max_length=1000)] = ()
    options: Mapping[str, Setting | tuple[Setting, ...]] = field(default_factory=dict)
    protocol: Protocol | None = None


@dataclass(frozen=True)
class UntilDecided:
    """Stop a run as soon as its verdicts are settled; see :mod:`kvgate.evals.run.early_stopping`.

    ``items``: at most this many; None: all that the suites make. ``minutes``: begin no further round after this long;
    where that ends a run, its result depends on the machine.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = STRICT

    items: Annotated[int, Field(ge=1, lt=1 << 53)] | None = None
    minutes: Annotated[float, Field(gt=0)] | None = None


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a run's outcome.

    Attributes:
        model: "embedded", a local folder or a hub id. ``revision``: hub revision. ``dtype``: weights and cache.
        numerics: what rounding may depend on; see :data:`kvgate.engine.models.NUMERICS`. None: "batch", and "fast" in
            float32.
        batch_rows: most rows of one decode batch. ``pages``: pool size; 0: as many as a batch can need.
        gate: name or file of the gate the verdicts are made with.
        date: the day, as YYYY-MM-DD, that a chat template which prints the date is told.
        until_decided: look after every round and stop when nothing is open; None: run everything.
        primary: label of the one row that may be enabled, named before the run, so that it need not share the gate's
            alpha; None: all families share it.
        seeds: several seeds of items, all of them in one run with one verdict; none: ``seed`` alone. The order of the
            run is drawn by ``seed``.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = STRICT

    name: Text
    suites: Annotated[tuple[SuiteChoice, ...], Field(min_length=1, max_length=256)]
    policies: Annotated[tuple[PolicyChoice, ...], Field(min_length=1, max_length=256)]
    model: Text = "embedded"
    revision: Text | None = None
    dtype: Text = "bfloat16"
    numerics: Literal["fast", "batch", "order", "portable"] | None = None
    gate: Text = "screen"
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    page_size: Annotated[int, Field(ge=1, le=4096)] = 16
    prefill_chunk: Tokens = 2048
    batch_rows: Annotated[int, Field(ge=2, le=65536)] = 48
    pages: Annotated[int, Field(ge=0, lt=1 << 31)] = 0
    date: Text = DEFAULT_DATE
    until_decided: UntilDecided | None = None
    primary: Text | None = None
    seeds: Annotated[tuple[Annotated[int, Field(ge=0, lt=1 << 63)], ...], Field(max_length=64)] = ()

    @property
    def item_seeds(self) -> tuple[int, ...]:
        """Seeds that items are made with, one set each."""
        return self.seeds or (self.seed,)


def shipped(folder: str) -> list[str]:
    """Names of the YAML files of ``configs/<folder>``."""
    found = (files("kvgate") / "configs" / folder).iterdir()
    return sorted(entry.name.removesuffix(".yaml") for entry in found if entry.name.endswith(".yaml"))


def read_yaml(name_or_path: str, folder: str, what: str) -> dict[str, Any]:
    """The mapping in a file, or in ``configs/<folder>/<name>.yaml``. ValueError in one line."""
    if name_or_path in shipped(folder):
        text = (files("kvgate") / "configs" / folder / f"{name_or_path}.yaml").read_text(encoding="utf-8")
    elif not is_file(name_or_path):
        raise ValueError(f"{what} {name_or_path!r:.200}: no such file; shipped: {', '.join(shipped(folder))}")
    else:
        text = read_text(Path(name_or_path), LARGEST_YAML, what)
    raw = strict_yaml.load(text, f"{what} {name_or_path}")
    if not isinstance(raw, dict):
        raise ValueError(f"{what} {name_or_path}: expected a mapping of keys, got {type(raw).__name__}")
    return raw


def load_plan(name_or_path: str, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """A plan shipped with kvgate or in a YAML file, with ``overrides`` from the command line on top."""
    raw = read_yaml(name_or_path, "plans", "plan")
    raw = {"name": Path(name_or_path).stem, **raw, **(overrides or {})}
    return parse_plan(raw, f"plan {name_or_path}")


def parse_plan(raw: Mapping[str, Any], where: str) -> RunConfig:
    """A checked plan from plain data. Raises ValueError naming the key, its value and what is expected.

    A suite may be given by its name alone, a policy by the name of a file under ``configs/policies``, and
    ``until_decided`` as true.
    """
    written = dict(raw)
    for key, full in (("suites", _suite_entry), ("policies", _policy_entry)):
        if isinstance(written.get(key), list | tuple):
            written[key] = [full(entry, f"{where}: {key}[{place}]") for place, entry in enumerate(written[key])]
    if isinstance(written.get("until_decided"), bool):
        written["until_decided"] = {} if written["until_decided"] else None
    config = parse(RunConfig, written, where)
    for place, suite in enumerate(config.suites):
        _check_suite(suite, config.suites[:place], f"{where}: suites[{place}]")
    for place, choice in enumerate(config.policies):
        _check_policy(choice, f"{where}: policies[{place}]")
    check_date(config.date, where)
    if len(set(config.seeds)) != len(config.seeds):
        raise ValueError(f"{where}: seeds is {list(config.seeds)}; list each seed once")
    return config


def check_date(date: str, where: str) -> None:
    """ValueError unless ``date`` is a day written YYYY-MM-DD."""
    try:
        fine = datetime.strptime(date, "%Y-%m-%d").strftime("%Y-%m-%d") == date
    except ValueError:
        fine = False
    if not fine:
        raise ValueError(f"{where}: date is {date!r:.40}; give a day as YYYY-MM-DD, for example {DEFAULT_DATE}")


def policy_entry(text: str) -> dict[str, Any]:
    """The plan entry behind ``NAME@BUDGET[,BUDGET]``: ``h2o@0.5,512``, ``module:Class@0.25``. ValueError if bad."""
    name, at, budgets = text.rpartition("@")
    if not at or not name:
        raise ValueError(f"--policy {text!r:.200}: give a name and budgets, for example h2o@0.5,512")
    entry: dict[str, Any] = {"use": name} if name in shipped("policies") else {"policy": name}
    return {**entry, "budgets": [_number(part, text) for part in budgets.split(",")]}


def _number(part: str, text: str) -> int | float:
    try:
        return int(part) if part.strip().isdecimal() else float(part)
    except ValueError as error:
        raise ValueError(f"--policy {text!r:.200}: budget {part!r:.40} is not a number") from error


def parse_policy(raw: Any, where: str) -> PolicyChoice:
    """A policy entry: a name under ``configs/policies``, a YAML file, or a mapping (with ``use``, on top of one)."""
    choice = parse(PolicyChoice, _policy_entry(raw, where), where)
    _check_policy(choice, where)
    return choice


def _policy_entry(raw: Any, where: str) -> Any:
    """The entry with what it uses filled in."""
    if isinstance(raw, str):
        raw = {"use": raw}
    if not isinstance(raw, dict) or "use" not in raw:
        return raw
    if not isinstance(raw["use"], str):
        raise ValueError(f"{where}: use is {raw['use']!r:.80}; give the name of a policy file")
    base = read_yaml(raw["use"], "policies", "policy")
    entry = {**base, **{key: value for key, value in raw.items() if key != "use"}}
    params = [source.get("params", {}) for source in (base, raw)]
    if all(isinstance(given, dict) for given in params):
        entry["params"] = {**params[0], **params[1]}
    return entry


def _check_policy(choice: PolicyChoice, where: str) -> None:
    """ValueError for an unknown policy, an unknown parameter, or a value that is not of the parameter's type."""
    kind = policy_class(choice.policy)
    check_parameters(kind, dict(choice.params))
    hints = get_type_hints(kind.for_budget, include_extras=True)
    for name, value in choice.params.items():
        if name in hints and name in parameters(kind):
            parse(hints[name], value, f"{where}: params.{name}")


def _suite_entry(raw: Any, where: str) -> Any:
    return {"name": raw} if isinstance(raw, str) else raw


def _check_suite(suite: SuiteChoice, before: tuple[SuiteChoice, ...], where: str) -> None:
    """ValueError for what is listed twice: a task, a depth, or the same items under another entry."""
    for key, values in (("tasks", suite.tasks), ("depths", suite.depths)):
        if len(set(values)) < len(values):
            raise ValueError(f"{where}: {key} is {list(values)!r:.80}; list each once")
    if any(_overlap(suite, other) for other in before):
        raise ValueError(f"{where}: suite {suite.name} has items that an entry before it has; list them once")


def _overlap(one: SuiteChoice, other: SuiteChoice) -> bool:
    """Whether both ask for some item: the same tasks and lengths, and nothing else that tells them apart."""
    if replace(one, tasks=(), counts={}) != replace(other, tasks=(), counts={}):
        return False
    tasks = not one.tasks or not other.tasks or set(one.tasks) & set(other.tasks)
    lengths = not one.counts or not other.counts or set(one.counts) & set(other.counts)
    return bool(tasks and lengths)


def recorded_plan(manifest: Mapping[str, Any]) -> RunConfig:
    """The plan that a run's manifest records. ValueError if a policy it names is not installed here."""
    return parse_plan(manifest["plan"], "run.json: plan")
