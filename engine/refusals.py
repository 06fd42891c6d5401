"""Models that cannot be served and policies that a row cannot take, each refused by name.

Silence here would mean a wrong verdict later.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from typing import TYPE_CHECKING, Any

from kvgate.compressors.evidence import QueryMoments, missing
from kvgate.compressors.policy import Policy
from kvgate.engine.sequence import Sequence

if TYPE_CHECKING:
    from kvgate.engine.models import ModelInfo


def refuse_config(config: Any, name: str) -> None:
    """ValueError if the configuration alone rules the model out, before weights are read. What its layers do is seen by
    :mod:`kvgate.engine.probe` and :mod:`kvgate.engine.self_check`.
    """
    text = config.get_text_config()
    reason = _config_reason(config, text)
    if reason:
        serves = "kvgate serves decoder-only models with plain or grouped-query attention"
        raise ValueError(f"model {name!r} ({text.model_type}): {reason}; {serves}")


def refuse_modules(module: Any, name: str) -> None:
    """ValueError for what only the modules say: attention in both directions or of a fixed kind."""
    for path, part in module.named_modules():
        if getattr(part, "is_causal", True) is False:
            raise ValueError(f"model {name!r}: {path} attends in both directions; kvgate serves causal models only")
    if not getattr(module, "_supports_attention_backend", False):
        raise ValueError(f"model {name!r}: {type(module).__name__} does not take another attention implementation")


def _config_reason(config: Any, text: Any) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "encoder-decoder model"
    try:
        heads, layers = getattr(text, "num_attention_heads", None), getattr(text, "num_hidden_layers", None)
    except RuntimeError:  # transformers refuses to name one number where layers differ
        return "the number of attention heads differs between layers"
    if not heads or not layers:
        return "no attention heads in its configuration"
    if any(rope.get("rope_type") == "dynamic" for rope in rope_variants(text)):
        return "dynamic rotary scaling changes keys that are already cached"
    return None


def refuse_policy(policy: Policy, row: Sequence, info: ModelInfo) -> None:
    """ValueError if ``policy`` cannot take over ``row``: no room beside what is protected (BudgetTooSmall), evidence
    that was never collected, or positions that this model's queries cannot be turned to.
    """
    policy.check(row.protected)
    lacking = missing(policy.needs, row.collect)
    if lacking and row.length:
        raise ValueError(f"policy {policy.name}: needs {', '.join(lacking)}, not collected during prefill")
    if any(isinstance(need, QueryMoments) for need in policy.needs) and not info.rotates_halves:
        raise ValueError(
            f"policy {policy.name}: needs queries before rotation, and kvgate cannot turn the rotary embedding of "
            f"{info.model_type}; use another policy"
        )
    bounds = policy.bounds(row.protected)
    if bounds and bounds.rebased_sinks and not info.rotates_halves:
        raise ValueError(
            f"policy {policy.name}: positions: rebased is not possible with {info.model_type}, whose rotary embedding "
            "kvgate cannot turn back; use positions: original"
        )


def refuse_overflow(info: ModelInfo, rows: Several[Sequence], counts: Several[int]) -> None:
    """ValueError for a row without new tokens, or with more than the model has positions for."""
    for row, count in zip(rows, counts, strict=True):
        if count == 0:
            raise ValueError("a row has no new tokens")
        if row.length + count > info.max_positions:
            raise ValueError(f"sequence of {row.length + count} tokens: the model has {info.max_positions} positions")


def rope_variants(text: Any) -> list[dict[str, Any]]:
    """The rotary parameters of a configuration: one set, or one for each kind of layer."""
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    nested = [part for part in rope.values() if isinstance(part, dict)]
    return nested or [rope]
