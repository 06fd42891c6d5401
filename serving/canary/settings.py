"""A canary config, as ``kvgate canary`` writes it, ready for a server: policy, scope, and what judges the rollout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema

from kvgate import strict_yaml
from kvgate.compressors.catalog import check_parameters, policy_class
from kvgate.compressors.policy import Policy
from kvgate.evals.leaderboard.rollout import Rollout
from kvgate.evals.plan.cells import resolve
from kvgate.serving.canary.progress import Judge
from kvgate.serving.canary.routing import Scope
from kvgate.typed import parse, read_text

_LARGEST = 1 << 20  # bytes of a canary config


@dataclass(frozen=True)
class Canary:
    """See the module docstring.

    Attributes:
        name, params, request: the policy and its budget, a ratio (float) or tokens (int). label: for people.
        verdict: names the evidence; another verdict begins another rollout.
        first_traffic: share of traffic the config itself asks for.
    """

    name: str
    params: Mapping[str, Any]
    request: float | int
    label: str
    scope: Scope
    judge: Judge
    verdict: str
    first_traffic: float

    def policy(self, prompt: int) -> Policy:
        """The policy for a prompt of so many tokens. ValueError where its budget cannot hold what must stay.

        A ratio is one of the tokens there are when it takes over: all of the prompt but the last, as in the verdict.
        """
        kind = policy_class(self.name)
        budget = resolve(self.request, max(1, prompt - 1))
        if isinstance(self.request, float):
            budget = max(budget, kind.smallest_budget(**self.params))
        made = kind.for_budget(budget, **self.params)
        made.check(())
        return made


def load_canary(path: Path) -> Canary:
    """Read a canary config. ValueError in one line for anything that is none."""
    raw = strict_yaml.load(read_text(path, _LARGEST, "canary"), f"canary {path}")
    return parse_canary(raw, f"canary {path.name}")


def parse_canary(raw: Any, where: str = "canary") -> Canary:
    """A canary config from plain data."""
    schema = json.loads((files("kvgate") / "configs" / "schemas" / "canary.schema.json").read_text("utf-8"))
    try:
        jsonschema.validate(raw, schema)
    except jsonschema.ValidationError as error:
        place = ".".join(str(part) for part in error.absolute_path) or "the file"
        raise ValueError(f"{where}: {place}: {error.message[:160]}; emit it with `kvgate canary RUN`") from error
    policy, scope, analysis = raw["policy"], raw["scope"], raw["analysis"]
    kind = policy_class(policy["name"])
    check_parameters(kind, policy["params"])
    budget = policy["budget"]
    request: float | int = float(budget["ratio"]) if "ratio" in budget else int(budget["tokens"])
    rollout: Rollout = parse(Rollout, raw.get("rollout", {}), f"{where}: rollout")
    return Canary(
        policy["name"],
        policy["params"],
        request,
        _label(kind.name, policy["params"], request),
        Scope(
            scope["model"]["weights_hash"],
            scope["longest_tokens"],
            tuple(scope["protocols"]),
            tuple(scope["suites"]),
        ),
        Judge(rollout, analysis["margin"], analysis["alpha"], scope["longest_tokens"], raw["mode"] == "shadow"),
        f"{raw['evidence']['config_hash']}-{raw['evidence']['samples_hash']}-{raw['evidence']['gate']['content_hash']}",
        raw["traffic_fraction"],
    )


def _label(name: str, params: Mapping[str, Any], request: float | int) -> str:
    """As leaderboards name it."""
    shown = ",".join(f"{key}={value}" for key, value in sorted(params.items()))
    budget = f"{request:.4g}" if isinstance(request, float) else str(request)
    return f"{name}({shown})@{budget}" if shown else f"{name}@{budget}"
