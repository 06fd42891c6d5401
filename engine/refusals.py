"""Models that cannot be served and policies that a row cannot take, each refused by name.

Silence here would mean a wrong verdict later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvgate.compressors.policy import Need, Policy
from kvgate.engine.sequence import Sequence

if TYPE_CHECKING:
    from kvgate.engine.models import ModelInfo

_GATHERED: frozenset[Need] = frozenset({"mass", "queries"})  # while tokens are fed; keys and values lie in the pages
_ATTENTION_KINDS = {"full_attention", "sliding_attention"}


def refuse_config(config: Any, name: str) -> None:
    """ValueError if the configuration says what paged KV per head cannot hold."""
    text = config.get_text_config()
    reason = _config_reason(config, text)
    if reason:
        serves = "kvgate serves decoder-only models with plain or grouped-query attention"
        raise ValueError(f"model {name!r} ({text.model_type}): {reason}; {serves}")


def refuse_modules(module: Any, name: str) -> None:
    """ValueError for what only the modules show: learned sinks, attention in both directions or of a fixed kind."""
    for path, part in module.named_modules():
        if getattr(part, "is_causal", True) is False:
            raise ValueError(f"model {name!r}: {path} attends in both directions; kvgate serves causal models only")
        if getattr(part, "sinks", None) is not None:
            raise ValueError(f"model {name!r}: {path} has learned attention sinks (gpt-oss), which are not supported")
    if not getattr(module, "_supports_attention_backend", False):
        raise ValueError(f"model {name!r}: {type(module).__name__} does not take another attention implementation")


def _config_reason(config: Any, text: Any) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "encoder-decoder model"
    if getattr(text, "kv_lora_rank", None):
        return "multi-head latent attention (MLA) caches no keys per head"
    kinds = getattr(text, "layer_types", None) or ()
    if unknown := sorted(set(kinds) - _ATTENTION_KINDS):
        return f"layers of kind {', '.join(unknown)}"
    for field in (
        "ssm_cfg",
        "state_size",
        "mamba_d_state",
        "layers_block_type",
        "hybrid_override_pattern",
        "ssm_state_size",
    ):
        if getattr(text, field, None):
            return f"state-space layers ({field})"
    if getattr(text, "num_kv_shared_layers", 0):
        return "layers share keys and values (num_kv_shared_layers)"
    if getattr(text, "global_head_dim", None) not in (None, getattr(text, "head_dim", None)):
        return "head_dim differs between layers"
    if not getattr(text, "num_attention_heads", None) or not getattr(text, "num_hidden_layers", None):
        return "no attention heads in its configuration"
    if any(rope.get("rope_type") == "dynamic" for rope in rope_variants(text)):
        return "dynamic rotary scaling changes keys that are already cached"
    return None


def refuse_policy(policy: Policy, row: Sequence, info: ModelInfo) -> None:
    """ValueError if ``policy`` cannot take over ``row``: no room beside what is protected (BudgetTooSmall), evidence
    that was never collected, or positions that this model's queries cannot be turned to.
    """
    policy.check(row.protected)
    missing = policy.needs & _GATHERED - row.collect
    if missing and row.length:
        raise ValueError(f"policy {policy.name}: needs {', '.join(sorted(missing))}, not collected during prefill")
    bounds = policy.bounds(row.protected)
    if bounds and bounds.rebased_sinks and not info.rotates_halves:
        raise ValueError(
            f"policy {policy.name}: positions: rebased is not possible with {info.model_type}, whose rotary embedding "
            "kvgate cannot turn back; use positions: original"
        )


def rope_variants(text: Any) -> list[dict[str, Any]]:
    """The rotary parameters of a configuration: one set, or one for each kind of layer."""
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    nested = [part for part in rope.values() if isinstance(part, dict)]
    return nested or [rope]
