"""Suite names to classes. Own suites, those of other packages (entry points) and ``module:Class``."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points

from kvgate.evals.suites.base import Suite
from kvgate.evals.suites.code.suite import Code
from kvgate.evals.suites.fidelity import FidelitySuite
from kvgate.evals.suites.hub.longbench import HubLongBench
from kvgate.evals.suites.hub.longbench2 import HubLongBench2
from kvgate.evals.suites.hub.longmemeval import HubLongMemEval
from kvgate.evals.suites.hub.repobench import HubRepoBench
from kvgate.evals.suites.hub.ruler import HubRuler
from kvgate.evals.suites.hub.scbench import HubSCBench
from kvgate.evals.suites.long_generation import LongGeneration
from kvgate.evals.suites.multi_turn.instructions import Instructions
from kvgate.evals.suites.multi_turn.suite import MultiTurn
from kvgate.evals.suites.retrieval.shared import Shared
from kvgate.evals.suites.retrieval.suite import Retrieval

GROUP = "kvgate.suites"
OWN: tuple[type[Suite], ...] = (Retrieval, Code, MultiTurn, Instructions, Shared, LongGeneration, FidelitySuite)
HUB: tuple[type[Suite], ...] = (HubRuler, HubLongBench, HubLongBench2, HubSCBench, HubRepoBench, HubLongMemEval)


def catalog() -> dict[str, type[Suite]]:
    """Name -> class: kvgate's own, then installed entry points. ValueError if two claim one name."""
    found = {suite.name: suite for suite in (*OWN, *HUB)}
    for point in sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value)):
        if point.name in found:
            raise ValueError(f"suite {point.name!r}: {point.value} claims a name that is taken; uninstall or rename it")
        found[point.name] = _checked(point.value, point.load())
    return found


def suite_class(name: str) -> type[Suite]:
    """The class behind a catalog name or ``module:Class``. ValueError names what there is."""
    if ":" in name:
        return _load(name)
    known = catalog()
    if name not in known:
        raise ValueError(f"suite {name!r} is unknown; known: {', '.join(sorted(known))}, or module:Class")
    return known[name]


def _load(reference: str) -> type[Suite]:
    module, _, attribute = reference.partition(":")
    try:
        return _checked(reference, getattr(importlib.import_module(module), attribute))
    except (ImportError, AttributeError) as error:
        raise ValueError(f"suite {reference!r} cannot be imported: {error}") from error


def _checked(reference: str, found: object) -> type[Suite]:
    if not (isinstance(found, type) and issubclass(found, Suite)):
        raise ValueError(f"suite {reference!r} is not a subclass of kvgate.evals.suites.base:Suite")
    return found
