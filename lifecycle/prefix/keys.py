"""Keys of cached blocks: a chain of BLAKE2b-256 over everything that makes two prefixes equal.

The first link hashes model version, tenant and adapter, each under its own tag and with its length, so that no two
different triples give the same bytes (adapter "x" is not tenant "x"). Each further link hashes the link before it and
the block's token ids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

Hasher = Callable[[bytes], bytes]


@dataclass(frozen=True)
class Namespace:
    """Who may share with whom: only requests of one model version, tenant and adapter."""

    model_version: str
    tenant: str
    adapter: str = ""

    def encoded(self) -> bytes:
        """Unambiguous bytes of the three fields."""
        parts = []
        for tag, value in ((b"model", self.model_version), (b"tenant", self.tenant), (b"adapter", self.adapter)):
            raw = value.encode()
            parts.append(tag + len(raw).to_bytes(8, "little") + raw)
        return b"kvgate-prefix-1" + b"".join(parts)


def blake(data: bytes) -> bytes:
    """32 bytes of BLAKE2b."""
    return blake2b(data, digest_size=32).digest()
