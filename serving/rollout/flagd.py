"""flagd: a flag whose variants are "exact" and "policy", split by conversation."""

from __future__ import annotations

from typing import Any

from kvgate.serving.rollout.facts import Facts

SCHEMA = "https://flagd.dev/schema/v0/flags.json"
KEY = "kvgate-policy"
_PARTS = 10_000  # weights are whole numbers


def flags(facts: Facts) -> dict[str, Any]:
    """The flag file. The targeting key is the conversation's id, so that a conversation stays where it is."""
    share = 0 if facts.shadow_only else round(facts.first * _PARTS)
    split = {"fractional": [["policy", share], ["exact", _PARTS - share]]}
    return {
        "$schema": SCHEMA,
        "flags": {
            KEY: {
                "state": "ENABLED",
                "variants": {"exact": "full", "policy": facts.label},
                "defaultVariant": "exact",
                "targeting": split,
            }
        },
    }
