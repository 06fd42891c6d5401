"""Policy names to classes: kvgate's own, those of other packages, and ``module:Class`` for a file of your own."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable
from importlib.metadata import entry_points

from kvgate.compressors.expected_attention import ExpectedAttention
from kvgate.compressors.full import Full
from kvgate.compressors.h2o import H2O
from kvgate.compressors.h2o_normalised import H2ONormalised
from kvgate.compressors.keydiff import KeyDiff
from kvgate.compressors.knorm import Knorm
from kvgate.compressors.kvzip import KVzip
from kvgate.compressors.policy import Policy
from kvgate.compressors.pyramid_kv import PyramidKV
from kvgate.compressors.r_kv import RKV
from kvgate.compressors.random_choice import RandomChoice
from kvgate.compressors.sliding_window import SlidingWindow
from kvgate.compressors.snapkv import SnapKV
from kvgate.compressors.streaming_llm import StreamingLLM
from kvgate.compressors.tova import TOVA

ENTRY_POINT_GROUP = "kvgate.policies"
_OWN: tuple[type[Policy], ...] = (
    Full, SlidingWindow, StreamingLLM, H2O, H2ONormalised, KVzip, KeyDiff, SnapKV, PyramidKV, TOVA, ExpectedAttention,
    Knorm, RKV, RandomChoice,
)  # fmt: skip


def catalog() -> dict[str, type[Policy]]:
    """Every policy that can be named: kvgate's own and those registered under the entry point group."""
    found = {policy.name: policy for policy in _OWN}
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name in found:
            raise ValueError(f"policy {point.name!r}: {point.value} would replace kvgate's own; give it another name")
        found[point.name] = _loaded(point.name, point.load, point.value)
        if found[point.name].name != point.name:
            raise ValueError(f"policy {point.name!r}: {point.value} calls itself {found[point.name].name!r}")
    return found


def policy_class(name: str) -> type[Policy]:
    """The class behind a catalog name or ``module:Class``. ValueError if there is none."""
    if ":" in name:
        module, _, attribute = name.partition(":")
        return _loaded(name, lambda: getattr(importlib.import_module(module), attribute), "an importable module:Class")
    known = {policy.name: policy for policy in _OWN}
    if name not in known:
        known = catalog()
    if name not in known:
        raise ValueError(f"policy {name!r} is unknown; known: {', '.join(sorted(known))}, or module:Class")
    return known[name]


def parameters(policy: type[Policy]) -> dict[str, inspect.Parameter]:
    """What ``for_budget`` takes besides the budget: what it names; with ``**params``, fields that have a default."""
    named = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    signature = inspect.signature(policy.for_budget).parameters
    found = {name: each for name, each in signature.items() if name != "budget" and each.kind in named}
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in signature.values()):
        fields = {field.name for field in dataclasses.fields(policy) if field.default is not dataclasses.MISSING}
        made = inspect.signature(policy).parameters
        found |= {name: each for name, each in made.items() if name in fields}
    return found


def check_parameters(policy: type[Policy], params: dict[str, object]) -> None:
    """ValueError naming a parameter that ``for_budget`` does not take."""
    known = parameters(policy)
    for name in params:
        if name not in known:
            raise ValueError(f"policy {policy.name}: unknown parameter {name!r}; known: {', '.join(known) or 'none'}")


def _loaded(name: str, load: Callable[[], object], expected: str) -> type[Policy]:
    """What ``load`` gives, if it is a policy that can be made; ValueError whatever goes wrong in others' code."""
    try:
        found = load()
    except Exception as error:
        reason = str(error).strip().splitlines() or [""]
        raise ValueError(f"policy {name!r}: {type(error).__name__}: {reason[0]}; expected {expected}") from error
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise ValueError(f"policy {name!r}: is not a subclass of kvgate.compressors.policy.Policy")
    missing = sorted(found.__abstractmethods__) + ([] if hasattr(found, "name") else ["name"])
    if missing:
        raise ValueError(f"policy {name!r}: lacks {', '.join(missing)}")
    return found
