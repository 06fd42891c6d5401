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


def catalog() -> tuple[dict[str, type[Suite]], dict[str, str]]:
    """Name -> class of kvgate's own suites and those of installed packages, and name -> why of those left out.

    What is wrong with one package's suite (it cannot be imported, it claims a name that is taken) leaves out that suite
    alone.
    """
    found: dict[str, type[Suite]] = {suite.name: suite for suite in (*OWN, *HUB)}
    broken: dict[str, str] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value)):
        if point.name in found:
            broken[point.name] = (
                f"suite {point.name!r}: {point.value} claims a name that is taken; uninstall or rename it"
            )
            continue
        try:
            found[point.name] = _load(point.value)
        except ValueError as error:
            broken[point.name] = str(error)
    return found, broken


def suite_class(name: str) -> type[Suite]:
    """The class behind a catalog name or ``module:Class``. ValueError names what there is."""
    if ":" in name:
        return _load(name)
    own = {suite.name: suite for suite in (*OWN, *HUB)}
    if name in own:
        return own[name]
    known, broken = catalog()
    if name in known:
        return known[name]
    raise ValueError(
        broken.get(name) or f"suite {name!r:.200} is unknown; known: {', '.join(sorted(known))}, or module:Class"
    )


def _load(reference: str) -> type[Suite]:
    module, _, attribute = reference.partition(":")
    try:
        found: object = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:  # whatever goes wrong in others' code
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"suite {reference!r:.200} cannot be imported: {reason[:200]}") from error
    return _checked(reference, found)


def _checked(reference: str, found: object) -> type[Suite]:
    if not (isinstance(found, type) and issubclass(found, Suite)):
        raise ValueError(f"suite {reference!r} is not a subclass of kvgate.evals.suites.base:Suite")
    return found
