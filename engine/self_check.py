"""The engine against the model's own attention, once for each model: is the exact run the model's own?

Two random prompts longer than any window run through the engine in fp32 side by side, prefilled in chunks and then
decoded, and the logits at every position are compared with one plain forward pass of the same weights under eager
attention (SDPA where the model has no eager one). A big model is cut to its first layers of every kind, and windows too
wide for a short prompt are narrowed, in a copy. No list of architectures decides.
"""

from __future__ import annotations

import copy
import time
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from kvgate.engine.check_cache import cache_key, recall, remember
from kvgate.engine.models import LoadedModel
from kvgate.engine.probe import attention_shape, one_line

TOLERANCE = 1e-3  # of the spread (standard deviation) of the model's own logits; fp32 rounding gives about 1e-5
DECODED = 10
_CHUNKS = (7, 9)  # after the first chunk, which is longer than any window
_SHORTEST = 48
_WIDEST = 256  # windows above are narrowed
_NARROW = 32
_BIG = 400_000_000  # parameters; above, only the first layers of every kind are run


@dataclass(frozen=True)
class Difference:
    """Engine against model.

    Attributes:
        largest: biggest absolute difference of a logit, fp32. ``tolerance``: the most that passes.
        position: first position beyond the tolerance, None if all are within. ``stage``: how that token was fed.
        layers: layers run. ``attention``: the model's own that was compared with. ``seconds``: wall time.
    """

    largest: float
    tolerance: float
    position: int | None
    stage: str | None
    layers: int
    attention: str
    seconds: float


def check_once(loaded: LoadedModel) -> Difference | None:
    """ValueError, one line, unless the engine gives the model's own logits; None if that is known already."""
    info = loaded.info
    config = loaded.module.config.to_json_string(use_diff=False)
    key = cache_key(info.weights_hash, config, info.device, info.numerics)
    if recall(key):
        return None
    found = self_check(loaded)
    if found.position is not None:
        raise ValueError(
            f"model {info.name!r} ({info.model_type}): its logits under kvgate are not its own: at position "
            f"{found.position} ({found.stage}) they differ from {found.attention} attention by {found.largest:.3g}, "
            f"tolerance {found.tolerance:.2g}; such a model cannot be judged"
        )
    remember(key, asdict(found))
    return found


def self_check(loaded: LoadedModel) -> Difference:
    """Compare engine and model on a copy in fp32. ValueError, one line, if either cannot be run."""
    started = time.perf_counter()
    name = loaded.info.name
    try:
        module = _cut(loaded)
        shift = _narrow(module)
        found = _compare(_as_loaded(module, loaded, name), started)
        if found.position is not None and shift:  # narrowing is an assumption of ours: the real windows decide
            found = _compare(_as_loaded(_cut(loaded), loaded, name), started)
    except ValueError:
        raise
    except Exception as error:  # whatever modules raise
        raise ValueError(f"model {name!r}: its self-check cannot be run: {one_line(error)}") from error
    return found


@torch.inference_mode()
def _compare(loaded: LoadedModel, started: float) -> Difference:
    length = _length(loaded)
    prompts = [_prompt(loaded, length, seed) for seed in (0, 1)]
    got, stages = _through_the_engine(loaded, prompts)
    want, attention = _by_the_model(loaded.module, prompts)
    apart = (got - want).abs().amax((0, 2))
    tolerance = max(TOLERANCE * float(want.std()), 1e-6)
    beyond = (~(apart <= tolerance)).nonzero().flatten().tolist()
    first = beyond[0] if beyond else None
    largest = float(apart.max()) if first is None else float(apart[first])
    seconds = round(time.perf_counter() - started, 3)
    stage = None if first is None else stages[first]
    return Difference(largest, tolerance, first, stage, loaded.info.layers, attention, seconds)


def _through_the_engine(loaded: LoadedModel, prompts: list[list[int]]) -> tuple[Tensor, list[str]]:
    """Logits ``[2, T, V]`` of both prompts and, for each position, how it was fed."""
    from kvgate.engine.engine import DEFAULT_PAGE_SIZE, Engine

    length = len(prompts[0])
    heads = loaded.info.layers * loaded.info.kv_heads
    engine = Engine(loaded, pages=2 * heads * (-(-length // DEFAULT_PAGE_SIZE) + 2))
    rows = [engine.begin() for _ in prompts]
    first = length - DECODED - sum(_CHUNKS)
    ends = [0, first, first + _CHUNKS[0], length - DECODED, *range(length - DECODED + 1, length + 1)]
    stages = ["prefill"] * first + ["chunked prefill"] * sum(_CHUNKS) + ["decode"] * DECODED
    fed = [
        torch.stack(
            [engine.extend([row], [tokens[:first]], every=True) for row, tokens in zip(rows, prompts, strict=True)]
        )
    ]
    for start, end in pairwise(ends[1:]):
        logits = engine.extend(rows, [tokens[start:end] for tokens in prompts], every=True)
        fed.append(logits.view(len(rows), end - start, -1))
    return torch.cat(fed, 1), stages


def _by_the_model(module: Any, prompts: list[list[int]]) -> tuple[Tensor, str]:
    """Logits ``[2, T, V]`` of one plain forward pass each, and the attention that gave them."""
    device = next(module.parameters()).device
    ours = module.config._attn_implementation
    failed: Exception | None = None
    for attention in ("eager", "sdpa"):
        try:
            module.set_attn_implementation(attention)
            found = [module(torch.tensor([ids], device=device), use_cache=False).logits[0] for ids in prompts]
            return torch.stack(found).float(), attention
        except Exception as error:  # a model without eager attention says so in many ways
            failed = failed or error
        finally:
            module.set_attn_implementation(ours)
    assert failed is not None
    raise failed


def _as_loaded(module: Any, loaded: LoadedModel, name: str) -> LoadedModel:
    shape = attention_shape(module, name)
    info = replace(loaded.info, layers=len(shape.windows), native_windows=shape.windows, dtype="float32")
    return LoadedModel(module, loaded.tokenizer, info)


def _length(loaded: LoadedModel) -> int:
    """Longer than any window by what follows the first chunk, as far as there are positions."""
    config = loaded.module.config.get_text_config()
    widest = max([*_window_values(config), *(window for window in loaded.info.native_windows if window)], default=0)
    return min(max(_SHORTEST, widest + 4) + sum(_CHUNKS) + DECODED, loaded.info.max_positions)


def _prompt(loaded: LoadedModel, length: int, seed: int) -> list[int]:
    """Random ids without the special ones, which some models mask."""
    config = loaded.module.config.get_text_config()
    rows = min(int(config.vocab_size), int(loaded.module.get_input_embeddings().weight.shape[0]))
    special = {config.pad_token_id, config.bos_token_id} if rows > 8 else set()
    made = torch.randint(rows, (2 * length + 16,), generator=torch.Generator().manual_seed(seed)).tolist()
    return [token for token in made if token not in special][:length]


# -- copies ---------------------------------------------------------------------------------------------------------


def _cut(loaded: LoadedModel) -> Any:
    """A copy in fp32; of a big model, of its first layers only."""
    module = loaded.module
    memo: dict[int, Any] = {}
    stack = _layer_list(module, loaded.info.layers)
    small = sum(parameter.numel() for parameter in module.parameters()) <= _BIG
    keep = loaded.info.layers if small or stack is None else _kinds_end(stack, loaded.info.native_windows)
    if stack is not None:
        memo = {id(layer): layer for layer in list(stack)[keep:]}  # shared, not copied, and dropped below
    made = copy.deepcopy(module, memo)
    if stack is not None and keep < loaded.info.layers:
        where = next(name for name, part in module.named_modules() if part is stack)
        del made.get_submodule(where)[keep:]
        made.config.get_text_config().num_hidden_layers = keep
    return made.float()


def _layer_list(module: nn.Module, layers: int) -> nn.ModuleList | None:
    for part in module.modules():
        if isinstance(part, nn.ModuleList) and len(part) == layers:
            return part
    return None


def _kinds_end(stack: nn.ModuleList, windows: tuple[int | None, ...]) -> int:
    """How many of the first layers show every kind there is: same modules, same window."""
    seen: dict[object, int] = {}
    for index, layer in enumerate(stack):
        kind = (windows[index], tuple(type(part).__name__ for part in layer.modules()))
        seen.setdefault(kind, index)
    return max(2, 1 + max(seen.values()))


def _window_values(holder: Any) -> set[int]:
    """Widths of windows among the attributes of a configuration or a module."""
    return {value for name, value in vars(holder).items() if _is_width(name, value)}


def _is_width(name: str, value: Any) -> bool:
    return ("window" in name or "chunk_size" in name) and type(value) is int and value > 1 and "max_" not in name


def _narrow(module: Any) -> bool:
    """Narrow the windows of ``module`` and its configurations in place, in their order; whether any was too wide."""
    holders = [module.config, module.config.get_text_config(), *(part for part in module.modules())]
    holders += [part.config for part in module.modules() if hasattr(part, "config")]
    widths = sorted(set().union(*(_window_values(holder) for holder in holders)))
    if not widths or widths[-1] <= _WIDEST:
        return False
    narrow, last, at = {}, None, _NARROW
    for width in widths:
        at += 0 if last is None else min(width - last, 8)
        narrow[width], last = min(width, at), width
    for holder in {id(holder): holder for holder in holders}.values():
        for name, value in list(vars(holder).items()):
            if _is_width(name, value):
                setattr(holder, name, narrow[value])
    return True
