"""Whether a request lies inside the scope of the verdict; outside of it everything is exact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PROTOCOL = "whole_prompt"  # how the server evicts: once the prompt, question included, is in


@dataclass(frozen=True)
class Scope:
    """What a verdict covers.

    Attributes:
        weights_hash: the model's. longest: tokens of prompt and answer. protocols, suites: as judged.
    """

    weights_hash: str
    longest: int
    protocols: tuple[str, ...]
    suites: tuple[str, ...]

    def outside(self, tokens: int, metadata: Mapping[str, str]) -> str | None:
        """Why a request is not covered; None where it is. ``tokens``: of prompt and answer at most."""
        if tokens > self.longest:
            return f"{tokens} tokens, the verdict covers {self.longest}"
        kind = metadata.get("kind")
        if kind is not None and kind not in self.suites:
            return f"kind {kind!r:.40}, the verdict covers {', '.join(self.suites)}"
        return None

    def refuse(self, weights_hash: str) -> None:
        """ValueError where nothing this server does is covered: another model, or another protocol."""
        if weights_hash != self.weights_hash:
            raise ValueError(
                f"canary: its verdict is for weights {self.weights_hash[:12]}, this model has {weights_hash[:12]}; "
                "judge this model with `kvgate run`"
            )
        if PROTOCOL not in self.protocols:
            raise ValueError(
                f"canary: its verdict is for protocol {', '.join(self.protocols)}, the server evicts as {PROTOCOL}; "
                f"run the plan with protocols: [{PROTOCOL}] and emit the canary again"
            )
