"""Run plans: YAML in, a checked :class:`RunConfig` out. An unknown key is an error that names it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

import yaml

from kvgate import strict_yaml
from kvgate.compressors.catalog import check_parameters, policy_class
from kvgate.evals.data.items import Protocol

Budget = int | float
"""Tokens per (layer, kv head), or a ratio in (0, 1] of the tokens there are when eviction happens."""


@dataclass(frozen=True)
class PolicyChoice:
    """A policy with its parameters, at several budgets.

    ``policy``: catalog name or ``module:Class``. ``oracle`` marks a policy that is known to read what a policy may
    not, for comparison only: its rows are invalid.
    """

    policy: str
    budgets: tuple[Budget, ...]
    params: Mapping[str, Any] = field(default_factory=dict)
    oracle: bool = False


@dataclass(frozen=True)
class SuiteChoice:
    """A suite and how much of it.

    ``counts``: nominal context length -> items a task. Empty ``counts``, ``depths`` and ``tasks`` mean the suite's own.
    ``protocol``: "whole_prompt" evicts with the question in the prompt; None is each item's own.
    """

    name: str
    counts: Mapping[int, int] = field(default_factory=dict)
    depths: tuple[float, ...] = ()
    tasks: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    protocol: Protocol | None = None


@dataclass(frozen=True)
class UntilDecided:
    """Stop a run as soon as its verdicts are settled; see :mod:`kvgate.evals.run.early_stopping`.

    ``items``: at most this many; None: all that the suites make. ``minutes``: begin no further round after this long;
    where that ends a run, its result depends on the machine.
    """

    items: int | None = None
    minutes: float | None = None


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides a run's outcome.

    Attributes:
        model: "embedded", a local folder or a hub id. ``revision``: hub revision. ``dtype``: weights and cache.
        batch_rows: most rows of one decode batch. ``pages``: pool size; 0: as many as a batch can need.
        gate: name or file of the gate the verdicts are made with.
        until_decided: look after every round and stop when nothing is open; None: run everything.
    """

    name: str
    suites: tuple[SuiteChoice, ...]
    policies: tuple[PolicyChoice, ...]
    model: str = "embedded"
    revision: str | None = None
    dtype: str = "bfloat16"
    gate: str = "screen"
    seed: int = 0
    page_size: int = 16
    prefill_chunk: int = 2048
    batch_rows: int = 48
    pages: int = 0
    until_decided: UntilDecided | None = None


def shipped(folder: str) -> list[str]:
    """Names of the YAML files of ``configs/<folder>``."""
    found = (files("kvgate") / "configs" / folder).iterdir()
    return sorted(entry.name.removesuffix(".yaml") for entry in found if entry.name.endswith(".yaml"))


def read_yaml(name_or_path: str, folder: str, what: str) -> dict[str, Any]:
    """The mapping in a file, or in ``configs/<folder>/<name>.yaml``. ValueError in one line."""
    if name_or_path in shipped(folder):
        text = (files("kvgate") / "configs" / folder / f"{name_or_path}.yaml").read_text(encoding="utf-8")
    else:
        path = Path(name_or_path)
        if not path.is_file():
            raise ValueError(f"{what} {name_or_path!r}: no such file; shipped: {', '.join(shipped(folder))}")
        text = path.read_text(encoding="utf-8")
    try:
        raw = strict_yaml.load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{what} {name_or_path}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{what} {name_or_path}: expected a mapping of keys, got {type(raw).__name__}")
    return raw


def load_plan(name_or_path: str, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """A plan shipped with kvgate or in a YAML file, with ``overrides`` from the command line on top."""
    raw = read_yaml(name_or_path, "plans", "plan")
    raw = {"name": Path(name_or_path).stem, **raw, **(overrides or {})}
    return parse_plan(raw, f"plan {name_or_path}")


def parse_plan(raw: Mapping[str, Any], where: str) -> RunConfig:
    """A checked plan from plain data. Raises ValueError naming the key, its value and what is expected."""
    values = _fields(RunConfig, raw, where)
    for key in ("suites", "policies"):
        if not isinstance(values.get(key), list) or not values[key]:
            raise ValueError(f"{where}: {key} is {values.get(key)!r}; list at least one")
    values["suites"] = tuple(_suite(entry, f"{where}: suites[{i}]") for i, entry in enumerate(values["suites"]))
    values["policies"] = tuple(parse_policy(p, f"{where}: policies[{i}]") for i, p in enumerate(values["policies"]))
    for key, least in (("seed", 0), ("page_size", 1), ("prefill_chunk", 1), ("batch_rows", 2), ("pages", 0)):
        if key in values:
            _whole(values[key], least, f"{where}: {key}")
    for key in ("name", "model", "dtype", "gate"):
        if key in values and (not isinstance(values[key], str) or not values[key]):
            raise ValueError(f"{where}: {key} is {values[key]!r}; give a text")
    values["until_decided"] = _until(values.get("until_decided"), f"{where}: until_decided")
    return RunConfig(**values)


def _until(raw: Any, where: str) -> UntilDecided | None:
    if raw is None or raw is False:
        return None
    if raw is not True and not isinstance(raw, dict):
        raise ValueError(f"{where} is {raw!r}; give true, or a mapping with items and minutes")
    values = {} if raw is True else _fields(UntilDecided, raw, where)
    if values.get("items") is not None:
        _whole(values["items"], 1, f"{where}: items")
    minutes = values.get("minutes")
    number = isinstance(minutes, int | float) and not isinstance(minutes, bool)
    if minutes is not None and not (number and math.isfinite(minutes) and minutes > 0):
        raise ValueError(f"{where}: minutes is {minutes!r}; give a number above 0")
    return UntilDecided(**values)


def policy_entry(text: str) -> dict[str, Any]:
    """The plan entry behind ``NAME@BUDGET[,BUDGET]``: ``h2o@0.5,512``, ``module:Class@0.25``. ValueError if bad."""
    name, at, budgets = text.rpartition("@")
    if not at or not name:
        raise ValueError(f"--policy {text!r}: give a name and budgets, for example h2o@0.5,512")
    entry: dict[str, Any] = {"use": name} if name in shipped("policies") else {"policy": name}
    return {**entry, "budgets": [_number(part, text) for part in budgets.split(",")]}


def _number(part: str, text: str) -> int | float:
    try:
        return int(part) if part.strip().isdigit() else float(part)
    except ValueError as error:
        raise ValueError(f"--policy {text!r}: budget {part!r} is not a number") from error


def parse_policy(raw: Any, where: str) -> PolicyChoice:
    """A policy entry: a name under ``configs/policies``, a YAML file, or a mapping (with ``use``, on top of one)."""
    if isinstance(raw, str):
        raw = {"use": raw}
    if not isinstance(raw, dict):
        raise ValueError(f"{where} is {raw!r}; give a policy name or a mapping")
    if "use" in raw:
        base = read_yaml(str(raw["use"]), "policies", "policy")
        raw = {**base, **{key: value for key, value in raw.items() if key != "use"}}
        raw["params"] = {**(base.get("params") or {}), **(raw.get("params") or {})}
    values = _fields(PolicyChoice, raw, where)
    if not isinstance(values.get("policy"), str):
        raise ValueError(f"{where}: policy is {values.get('policy')!r}; give a catalog name or module:Class")
    values["params"] = values.get("params") or {}
    check_parameters(policy_class(values["policy"]), values["params"])
    budgets = values.get("budgets")
    if not isinstance(budgets, list) or not budgets:
        raise ValueError(f"{where}: budgets is {budgets!r}; list token counts such as 512 or ratios such as 0.5")
    values["budgets"] = tuple(check_budget(budget, where) for budget in budgets)
    if not isinstance(values.get("oracle", False), bool):
        raise ValueError(f"{where}: oracle is {values['oracle']!r}; give true or false")
    return PolicyChoice(**values)


def check_budget(budget: Any, where: str) -> Budget:
    """An integer of at least 1, or a ratio in (0, 1]."""
    number = isinstance(budget, int | float) and not isinstance(budget, bool)
    if number and isinstance(budget, int) and budget >= 1:
        return budget
    if number and isinstance(budget, float) and math.isfinite(budget) and 0 < budget <= 1:
        return float(budget)
    raise ValueError(f"{where}: budget {budget!r}; give whole tokens from 1 on, or a ratio above 0 and at most 1.0")


def _suite(raw: Any, where: str) -> SuiteChoice:
    if isinstance(raw, str):
        raw = {"name": raw}
    if not isinstance(raw, dict):
        raise ValueError(f"{where} is {raw!r}; give a suite name or a mapping")
    values = _fields(SuiteChoice, raw, where)
    if not isinstance(values.get("name"), str):
        raise ValueError(f"{where}: name is {values.get('name')!r}; give a suite name or module:Class")
    counts = values.get("counts") or {}
    if not isinstance(counts, dict):
        raise ValueError(f"{where}: counts is {counts!r}; map lengths to items, for example {{1024: 10}}")
    for length, count in counts.items():
        _whole(length, 1, f"{where}: counts, length")
        _whole(count, 0, f"{where}: counts[{length}]")
    values["counts"] = counts
    for key in ("depths", "tasks"):
        if not isinstance(values.get(key) or [], Sequence) or isinstance(values.get(key), str):
            raise ValueError(f"{where}: {key} is {values[key]!r}; give a list")
        values[key] = tuple(values.get(key) or ())
    values["options"] = values.get("options") or {}
    if values.get("protocol") not in (None, *get_args(Protocol)):
        raise ValueError(f"{where}: protocol is {values['protocol']!r}; one of {', '.join(get_args(Protocol))}")
    return SuiteChoice(**values)


def _fields(kind: type[Any], raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    known = [spec.name for spec in fields(kind)]
    for key in raw:
        if key not in known:
            raise ValueError(f"{where}: unknown key {key!r}; known: {', '.join(known)}")
    return dict(raw)


def _whole(value: Any, least: int, where: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{where} is {value!r}; give a whole number from {least} on")
