"""Models that cannot be served, each refused by name. Silence here would mean a wrong verdict later."""

from __future__ import annotations

from typing import Any

_ATTENTION_KINDS = {"full_attention", "sliding_attention"}


def refuse_config(config: Any, name: str) -> None:
    """ValueError if the configuration says what paged KV per head cannot hold."""
    text = config.get_text_config()
    reason = _config_reason(config, text)
    if reason:
        serves = "kvgate serves decoder-only models with plain or grouped-query attention"
        raise ValueError(f"model {name!r} ({text.model_type}): {reason}; {serves}")


def refuse_modules(module: Any, name: str) -> None:
    """ValueError for what only the modules show: learned sinks, attention that takes no other implementation."""
    for path, part in module.named_modules():
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
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "dynamic":
        return "dynamic rotary scaling changes keys that are already cached"
    return None
