"""Loads a decoder-only model with plain or grouped-query attention, or says by name why it cannot be served."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kvgate.engine.embedded import EMBEDDED, embedded_folder, sha256
from kvgate.engine.refusals import refuse_config, refuse_modules, rope_variants

if TYPE_CHECKING:
    from kvgate.engine.probe import AttentionShape

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# How rounding may vary. ``fast``: with the batch and with how a prompt was cut. ``batch``: not with who else is in the
# batch (:mod:`kvgate.engine.tiling`). ``order``: nor with how many tokens are fed at once, so that prefill, chunks,
# decode and recomputation give the same bits (:mod:`kvgate.engine.by_token`). ``portable``: ``order`` in float32.
NUMERICS = ("fast", "batch", "order", "portable")
# Models whose rotary embedding turns the two halves of a head against each other, the form `rebase` undoes. Layers
# without rotary embedding (SmolLM3's) must not be turned, so a model with such layers does not count.
_HALVES = {"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "smollm3", "granite"}


@dataclass(frozen=True)
class ModelInfo:
    """What the engine and the records need to know of a model.

    Attributes:
        name: what the user asked for. ``revision``: hub commit or "local".
        weights_hash: BLAKE2b-128 over names and contents of the weight files (or over the tensors).
        native_windows: per layer, the sliding window the layer itself attends, None for full attention.
        max_positions: longest sequence the model was made for.
        stop_ids: end-of-sequence token ids.
        rotates_halves: whether ``positions: rebased`` is possible.
        numerics: what a token's logits may depend on besides the tokens before it; see :data:`NUMERICS`.
    """

    name: str
    revision: str
    model_type: str
    weights_hash: str
    dtype: str
    device: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    native_windows: tuple[int | None, ...]
    max_positions: int
    stop_ids: tuple[int, ...]
    rotates_halves: bool
    numerics: str = "fast"


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for the engine."""

    module: Any
    tokenizer: Any
    info: ModelInfo


def load_model(
    name: str = EMBEDDED,
    *,
    dtype: str = "bfloat16",
    device: str | None = None,
    revision: str | None = None,
    numerics: str | None = None,
) -> LoadedModel:
    """Load the embedded model, a local folder or a hub id. ValueError, one line, if it is not there or not servable.

    ``numerics``: one of :data:`NUMERICS`; None is "batch", and "fast" in float32, where rounding hardly ever shows.
    """
    import transformers

    from kvgate.engine.attention import ATTENTION_NAME, register

    register()
    transformers.utils.logging.disable_progress_bar()
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r}: choose one of {', '.join(DTYPES)}")
    if numerics is not None and numerics not in NUMERICS:
        raise ValueError(f"numerics {numerics!r:.40}: choose one of {', '.join(NUMERICS)}")
    if numerics == "portable" and dtype != "float32":
        raise ValueError(f"numerics portable: needs dtype float32, not {dtype}")
    numerics = numerics or ("fast" if dtype == "float32" else "batch")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    source = str(embedded_folder()) if name == EMBEDDED else name
    where: dict[str, Any] = {"pretrained_model_name_or_path": source, "revision": revision}
    if name == EMBEDDED or Path(source).is_dir():
        where.pop("revision")
        _check_folder(Path(source), name)
    elif source.startswith((".", "/", "~")):
        raise ValueError(f"model {name!r}: no such folder")
    with _loading(name):
        config = transformers.AutoConfig.from_pretrained(**where)
    refuse_config(config, name)
    with _loading(name):
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
        module, report = transformers.AutoModelForCausalLM.from_pretrained(
            **where, dtype=DTYPES[dtype], attn_implementation=ATTENTION_NAME, output_loading_info=True
        )
    if missing := sorted(report["missing_keys"]):  # transformers would fill them with random numbers
        raise ValueError(f"model {name!r}: its weights lack {len(missing)} tensors, {missing[0]} among them")
    revision = getattr(config, "_commit_hash", None) or "local"
    weights = hash_folder(Path(source)) if Path(source).is_dir() else _hash_tensors(module)
    return wrap(module.to(device), tokenizer, name=name, revision=revision, weights_hash=weights, numerics=numerics)


def wrap(
    module: Any,
    tokenizer: Any,
    *,
    name: str,
    revision: str = "local",
    weights_hash: str | None = None,
    numerics: str = "fast",
) -> LoadedModel:
    """A module that is already in memory (tests, notebooks). ValueError if it cannot be served."""
    from kvgate.engine.attention import ATTENTION_NAME, register
    from kvgate.engine.probe import attention_shape
    from kvgate.engine.self_check import check_once
    from kvgate.engine.tiling import tile_linears

    register()
    refuse_config(module.config, name)
    refuse_modules(module, name)
    module.eval()
    module.set_attn_implementation(ATTENTION_NAME)
    shape = attention_shape(module, name)
    info = _info(module, tokenizer, shape, name, revision, weights_hash or _hash_tensors(module))
    info = replace(info, numerics=numerics)
    if numerics != "fast":
        tile_linears(module)
    _refuse_tokenizer(module, tokenizer, name)
    loaded = LoadedModel(module, tokenizer, info)
    check_once(loaded)
    return loaded


def _info(module: Any, tokenizer: Any, shape: AttentionShape, name: str, revision: str, weights_hash: str) -> ModelInfo:
    config = module.config.get_text_config()
    parameter = next(module.parameters())
    return ModelInfo(
        name=name,
        revision=revision,
        model_type=config.model_type,
        weights_hash=weights_hash,
        dtype=str(parameter.dtype).removeprefix("torch."),
        device=parameter.device.type,
        layers=len(shape.windows),
        query_heads=shape.query_heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        native_windows=shape.windows,
        max_positions=_max_positions(config),
        stop_ids=_stop_ids(module, tokenizer),
        rotates_halves=config.model_type in _HALVES and all(getattr(config, "no_rope_layers", None) or ()),
    )


def _max_positions(config: Any) -> int:
    """Longrope switches its frequencies beyond the original length, under keys that are already cached: stop there.
    YaRN reaches ``factor`` times the original length (Peng et al. 2023, section 3), also where the configuration still
    gives the original one.
    """
    longest = declared = int(config.max_position_embeddings)
    for rope in rope_variants(config):
        own = getattr(config, "original_max_position_embeddings", None)
        original = rope.get("original_max_position_embeddings") or own
        if rope.get("rope_type") == "longrope" and original:
            longest = min(longest, int(original))
        if rope.get("rope_type") == "yarn" and rope.get("factor"):
            longest = max(longest, int((original or declared) * rope["factor"]))
    return longest


def _refuse_tokenizer(module: Any, tokenizer: Any, name: str) -> None:
    """ValueError if the tokenizer writes ids that the embedding has no row for."""
    if tokenizer is None:
        return
    rows = int(module.get_input_embeddings().weight.shape[0])
    most = max(tokenizer.get_vocab().values(), default=0)
    if most >= rows:
        raise ValueError(
            f"model {name!r}: its tokenizer writes ids up to {most}, its embedding has {rows} rows; "
            "use the tokenizer that was saved with these weights"
        )


def _stop_ids(module: Any, tokenizer: Any) -> tuple[int, ...]:
    found: set[int] = set()
    for value in (getattr(module.generation_config, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None)):
        found.update([value] if isinstance(value, int) else value or ())
    return tuple(sorted(found))


def _check_folder(folder: Path, name: str) -> None:
    if not (folder / "config.json").is_file():
        raise ValueError(f"model {name!r}: {folder} has no config.json; give a folder saved by save_pretrained")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        raise ValueError(f"model {name!r}: {folder} has no weights (*.safetensors)")


def hash_folder(folder: Path) -> str:
    """BLAKE2b-128 over names and contents of a model folder's weight files and its ``config.json``."""
    total = hashlib.blake2b(digest_size=16)
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin"), folder / "config.json"]):
        total.update(f"{file.name} {sha256(file)}\n".encode())
    return total.hexdigest()


def _hash_tensors(module: nn.Module) -> str:
    total = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(module.state_dict().items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


@contextmanager
def _loading(name: str) -> Iterator[None]:
    """Whatever transformers and the libraries under it raise on a bad folder, as one line."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"model {name!r}: cannot be loaded: {shorten(reason, 300)}") from error
