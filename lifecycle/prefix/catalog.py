"""Retention policies by name."""

from __future__ import annotations

from kvgate.lifecycle.prefix.policies import Frequency, Recency, RetentionPolicy, TimeToLive
from kvgate.lifecycle.prefix.value_density import ValueDensity

CATALOG: dict[str, type[Recency] | type[Frequency] | type[TimeToLive] | type[ValueDensity]] = {
    "lru": Recency,
    "lfu": Frequency,
    "ttl": TimeToLive,
    "value_density": ValueDensity,
}


def make_policy(name: str) -> RetentionPolicy:
    """A fresh policy with its defaults. Raises ValueError for an unknown name."""
    if name not in CATALOG:
        raise ValueError(f"prefix policy {name!r} is unknown; choose one of {', '.join(CATALOG)}")
    return CATALOG[name]()
