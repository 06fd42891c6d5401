"""Settings of ``kvgate serve``: frozen dataclasses read from YAML; an unknown key is an error naming it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from kvgate import strict_yaml
from kvgate.lifecycle.config import ManagerConfig, parse_config
from kvgate.typed import read_text

# While somebody else's prompt is computed, a round of 512 tokens bounds the gap between two tokens of a running answer
# (0.4 s for the embedded model on two CPU cores); a GPU takes the manager's own 2048.
DEFAULT_LIFECYCLE: ManagerConfig = parse_config({"tokens_per_step": 512, "max_running": 64}, "serve")
_LARGEST = 1 << 20  # bytes of a settings file
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Limits:
    """What one request, and all of them together, may take.

    Attributes:
        body_bytes: longest request body. max_tokens: of an answer whose request names none.
        queued: live requests beyond which new ones get 429. choices: most answers of one request (n times prompts).
        timeout_s: a request that takes longer ends. drain_s: seconds that running requests get after SIGTERM.
    """

    body_bytes: int = 4_000_000
    max_tokens: int = 512
    queued: int = 256
    choices: int = 64
    timeout_s: float = 600.0
    drain_s: float = 30.0


@dataclass(frozen=True)
class ServeConfig:
    """Everything but the model and the canary.

    Attributes:
        keys: SHA-256 of an API key (hex) -> tenant. Empty: no key is asked for and everybody is tenant "default".
        limits: see there. lifecycle: the manager's settings, tenants among them.
        log_prompts: write prompts and answers to the log; off unless asked.
    """

    keys: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    lifecycle: ManagerConfig = field(default_factory=lambda: DEFAULT_LIFECYCLE)
    log_prompts: bool = False


def parse_serve_config(raw: Any, where: str = "config") -> ServeConfig:
    """Settings from plain YAML data. ValueError naming an unknown key or a wrong value."""
    values = _mapping(raw or {}, where, ServeConfig)
    made: dict[str, Any] = {}
    if "keys" in values:
        made["keys"] = _keys(values["keys"], f"{where}.keys")
    if "limits" in values:
        made["limits"] = _limits(values["limits"], f"{where}.limits")
    if "lifecycle" in values:
        given = values["lifecycle"] or {}
        base = {"tokens_per_step": DEFAULT_LIFECYCLE.tokens_per_step, "max_running": DEFAULT_LIFECYCLE.max_running}
        made["lifecycle"] = parse_config({**base, **given} if isinstance(given, dict) else given, f"{where}.lifecycle")
    if "log_prompts" in values:
        if not isinstance(values["log_prompts"], bool):
            raise ValueError(f"{where}.log_prompts: {values['log_prompts']!r} is not true or false")
        made["log_prompts"] = values["log_prompts"]
    config = ServeConfig(**made)
    known = config.lifecycle.tenants
    for tenant in config.keys.values():
        if tenant not in known and "default" not in known:
            raise ValueError(f"{where}.keys: tenant {tenant!r} is not among lifecycle.tenants; add it there")
    return config


def load_serve_config(path: Path) -> ServeConfig:
    """Settings from a YAML file. ValueError in one line where it cannot be read."""
    return parse_serve_config(strict_yaml.load(read_text(path, _LARGEST, "config"), str(path)), path.name)


def _mapping(raw: Any, where: str, kind: type[Any]) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise ValueError(f"{where}: {raw!r} is not a mapping of settings")
    names = [each.name for each in fields(kind)]
    for key in raw:
        if key not in names:
            raise ValueError(f"{where}: unknown key {key!r}; known: {', '.join(sorted(names))}")
    return raw


def _keys(raw: Any, where: str) -> dict[str, str]:
    if not isinstance(raw, dict):
        raise ValueError(f"{where}: needs a mapping of SHA-256 of an API key to a tenant's name")
    for digest, tenant in raw.items():
        if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
            raise ValueError(f"{where}: a name is not 64 hexadecimal digits; give `printf %s KEY | sha256sum`")
        if not isinstance(tenant, str) or not tenant:
            raise ValueError(f"{where}.{digest[:8]}: {tenant!r} is not a tenant's name")
    return dict(raw)


def _limits(raw: Any, where: str) -> Limits:
    values = _mapping(raw or {}, where, Limits)
    for name, value in values.items():
        whole = isinstance(getattr(Limits(), name), int)
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or value <= 0:
            raise ValueError(f"{where}.{name}: {value!r} is not a positive {'integer' if whole else 'number'}")
    return Limits(**values)
