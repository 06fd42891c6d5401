"""A canary config as plain data, as ``kvgate canary`` emits it."""

from __future__ import annotations

from typing import Any


def canary_data(weights_hash: str = "6" * 32, dtype: str = "float32", **changes: Any) -> dict[str, Any]:
    """Of H2O at half of the prompt; ``changes`` replace whole sections."""
    raw: dict[str, Any] = {
        "schema_version": 2, "kind": "kvgate-canary", "mode": "canary", "traffic_fraction": 0.05,
        "policy": {"name": "h2o", "params": {}, "budget": {"ratio": 0.5}},
        "scope": {
            "model": {"name": "tiny", "revision": "local", "weights_hash": weights_hash, "dtype": dtype},
            "protocols": ["whole_prompt"], "longest_tokens": 600, "suites": ["chat"], "excluded": [],
            "outside": "exact",
        },
        "analysis": {
            "compare_with": "full", "metric": "task score of paired requests, in [0, 1]", "margin": 0.03,
            "alpha": 0.05, "minimum_pairs": 5, "on_loss": "roll_back", "on_missing_data": "pause",
            "on_nan": "pause",
        },
        "evidence": {
            "run": "made", "gate": {"name": "production", "content_hash": "7" * 32, "shipped": True},
            "config_hash": "1" * 32, "samples_hash": "2" * 32,
            "seal": "3" * 64, "verified": {"items": 1, "cells": 2}, "rerun": None,
            "git": {"revision": "4" * 40, "dirty": False}, "code_hash": "5" * 32, "reasons": [],
        },
    }  # fmt: skip
    return {**raw, **changes}
