"""Who asks, how urgently, and until when: API keys, priority and deadline headers."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

from kvgate.serving.errors import AUTH, ApiError

PRIORITY, DEADLINE, CONVERSATION = "x-request-priority", "x-request-deadline-ms", "x-conversation-id"
_LOWEST = 1_000_000


def tenant_of(authorization: str | None, keys: Mapping[str, str]) -> str:
    """The tenant behind a bearer token; "default" where no keys are configured. ApiError 401 otherwise."""
    if not keys:
        return "default"
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise ApiError(401, "no API key was given; send `Authorization: Bearer KEY`", kind=AUTH, code="invalid_api_key")
    digest = hashlib.sha256(key.strip().encode()).hexdigest()
    # Every entry is compared, so that the time taken says nothing about the key.
    found = [tenant for known, tenant in keys.items() if hmac.compare_digest(known, digest)]
    if not found:
        raise ApiError(401, "the API key is not known", kind=AUTH, code="invalid_api_key")
    return found[0]


def priority_of(headers: Mapping[str, str]) -> int:
    """0 is most urgent. ApiError 400 for what is no such number."""
    return _whole(headers, PRIORITY, 0, 0)


def seconds_left(headers: Mapping[str, str], most: float) -> float:
    """Seconds until the answer is worth nothing, at most ``most``."""
    return min(most, _whole(headers, DEADLINE, int(most * 1000), 1) / 1000)


def _whole(headers: Mapping[str, str], name: str, default: int, low: int) -> int:
    raw = headers.get(name)
    if raw is None:
        return default
    if not raw.isascii() or not raw.isdigit() or len(raw) > 12 or int(raw) < low:
        raise ApiError(400, f"header {name} is {raw[:30]!r}, needs an integer of at least {low}", param=name)
    return int(raw) if name == DEADLINE else min(int(raw), _LOWEST)
