"""Tiny random models, and an oracle that never evicts anything: it keeps every key and masks what a policy dropped."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface

from kvgate.engine.engine import Engine
from kvgate.engine.models import LoadedModel, wrap
from kvgate.engine.sequence import Sequence as Row

VOCABULARY = 97
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.25,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_MIXED = {"head_dim": 16, "sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}
_MULTI_HEAD = {"num_key_value_heads": 6}
# name -> (configuration class, what differs from _SHAPE)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama_one_layer": ("LlamaConfig", {"num_hidden_layers": 1}),
    "llama_multi_query": ("LlamaConfig", {"num_key_value_heads": 1}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2_window": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "mistral": ("MistralConfig", {"sliding_window": 12}),
    "mistral_full": ("MistralConfig", {"sliding_window": None}),
    "gemma": ("GemmaConfig", {"head_dim": 16}),
    "gemma2": ("Gemma2Config", {**_MIXED, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3TextConfig", _MIXED),
    "phi": ("PhiConfig", {"hidden_size": 96, "partial_rotary_factor": 0.5}),
    "phi3": ("Phi3Config", {"hidden_size": 96, "partial_rotary_factor": 0.5, "sliding_window": 12}),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0]}),
    "granite": ("GraniteConfig", {"attention_multiplier": 0.3}),
    "cohere": ("CohereConfig", {"logit_scale": 1.0}),
    "gpt_neox": ("GPTNeoXConfig", _MULTI_HEAD),
    "gpt2": ("GPT2Config", {"n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 256, **_MULTI_HEAD}),
    "bigcode": ("GPTBigCodeConfig", {"n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 256}),
}


@dataclass(frozen=True)
class Tiny:
    """A model for the engine and an untouched copy of the same weights."""

    loaded: LoadedModel
    copy: Any

    def engine(self, pages: int = 1000, page_size: int = 8, **options: Any) -> Engine:
        return Engine(self.loaded, pages=pages, page_size=page_size, **options)

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], attention: str = "eager") -> Tensor:
        """``[T, V]`` of the untouched model over the whole text."""
        self.copy.set_attn_implementation(attention)
        found: Tensor = self.copy(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return found


def make_config(name: str, **changes: Any) -> Any:
    kind, differs = ARCHITECTURES.get(name, (name, {}))
    shape = {**_SHAPE, **differs, **changes}
    if kind == "GPTBigCodeConfig":
        shape.pop("num_key_value_heads")
    return getattr(transformers, kind)(**shape)


@cache
def _make_tiny(name: str, changes: tuple[tuple[str, Any], ...]) -> Tiny:
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(make_config(name, **dict(changes))).eval()
    for parameter in model.parameters():  # biases and norms start at 0 and 1, which would hide that they are used
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    return Tiny(wrap(copy.deepcopy(model), None, name=name), model)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Tiny]:
    return lambda name="llama", **changes: _make_tiny(name, tuple(changes.items()))


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., Any]:
    """A configuration by architecture name above or by transformers' class name, shaped like the tiny models."""
    return make_config


@pytest.fixture(scope="session")
def text() -> Callable[[int, int], list[int]]:
    """``text(length, seed)``: random token ids."""

    def make(length: int, seed: int = 0) -> list[int]:
        return torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()

    return make


@pytest.fixture(scope="session")
def live_tokens() -> Callable[[Engine, Row], list[list[list[int]]]]:
    """Sorted positions of the live slots, ``[layer][head]``, repeats included."""

    def read(engine: Engine, row: Row) -> list[list[list[int]]]:
        seen = engine.evidence(row)
        return [
            [sorted(where[keep].tolist()) for where, keep in zip(heads, kept, strict=True)]
            for heads, kept in zip(seen.positions, seen.live, strict=True)
        ]

    return read


# -- the oracle -----------------------------------------------------------------------------------------------------


@dataclass
class Rule:
    """A policy in plain Python, from docs/ARCHITECTURE.md. ``heavy`` None: recency only (windows, StreamingLLM)."""

    budget: int
    forced: frozenset[int] = frozenset()
    heavy: int | None = None
    rebased: bool = False

    def visible(self, query: int, live: set[int]) -> set[int]:
        if self.heavy is not None:
            return {token for token in live if token <= query}
        others = sorted(token for token in live if token <= query and token not in self.forced)
        return {token for token in live & self.forced if token <= query} | set(others[-self.room :])

    def keep(self, live: set[int], mass: Sequence[float], length: int) -> set[int]:
        forced = live & self.forced
        others = sorted(live - forced, reverse=True)
        if self.heavy is None:
            return forced | set(others[: self.room])
        recent = [token for token in others if token >= length - (self.budget - self.heavy)][
            : self.budget - len(forced)
        ]
        rest = sorted(set(others) - set(recent), key=lambda token: (-mass[token], token))
        return forced | set(recent) | set(rest[: self.budget - len(forced) - len(recent)])

    @property
    def room(self) -> int:
        return self.budget - len(self.forced)


@dataclass
class _Layer:
    keys: Tensor
    values: Tensor
    mass: Tensor
    live: list[set[int]]
    window: int | None = None


@dataclass
class Oracle:
    """The untouched model in float64 with dense attention: all K and V stay, visibility is a set of tokens."""

    model: Any
    rule: Rule | None = None
    length: int = 0
    layers: dict[int, _Layer] = field(default_factory=dict)

    @torch.no_grad()
    def feed(self, tokens: Sequence[int]) -> Tensor:
        """Logits ``[T, V]`` after each of ``tokens``, fed together; the rule evicts afterwards."""
        where = torch.arange(self.length, self.length + len(tokens))[None]
        found: Tensor = self.model(
            torch.tensor([list(tokens)]), position_ids=where, use_cache=False, kvgate_oracle=self
        ).logits[0]
        self.length += len(tokens)
        self.evict()
        return found

    def evict(self) -> None:
        for layer in self.layers.values():
            for head, live in enumerate(layer.live):
                if layer.window is not None:
                    live = {token for token in live if self.length - token < layer.window}
                layer.live[head] = self.rule.keep(live, layer.mass[head].tolist(), self.length) if self.rule else live

    def attend(self, index: int, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None) -> Tensor:
        """q ``[Q, T, D]``, k and v ``[H, T, D]`` of the new tokens; ``[T, Q, D]`` back."""
        layer = self.layers[index]
        layer.keys, layer.values = torch.cat((layer.keys, k), 1), torch.cat((layer.values, v), 1)
        layer.mass = torch.nn.functional.pad(layer.mass, (0, k.shape[1]))
        out = torch.empty(q.shape[1], q.shape[0], v.shape[-1], dtype=q.dtype)
        group = q.shape[0] // k.shape[0]
        for head, live in enumerate(layer.live):
            live.update(range(self.length, self.length + k.shape[1]))
            for token in range(k.shape[1]):
                seen = self._seen(self.length + token, live, layer.window)
                for query in range(head * group, (head + 1) * group):
                    logits = self._logits(q[query, token], layer.keys[head], seen, self.length + token) * scale
                    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
                    weights = torch.softmax(logits, 0)
                    layer.mass[head, seen] += weights
                    out[token, query] = weights @ layer.values[head, seen]
        return out

    def _seen(self, query: int, live: set[int], window: int | None) -> list[int]:
        seen = self.rule.visible(query, live) if self.rule else {token for token in live if token <= query}
        return sorted(token for token in seen if window is None or query - token < window)

    def _logits(self, q: Tensor, keys: Tensor, seen: list[int], query: int) -> Tensor:
        if not (self.rule and self.rule.rebased):
            return keys[seen] @ q
        raw = self._turn(keys[seen], -torch.tensor(seen))  # cached before rotation, as the paper does
        inside = self._turn(raw, torch.arange(len(seen)))
        return inside @ self._turn(self._turn(q[None], torch.tensor([-query])), torch.tensor([len(seen) - 1]))[0]

    def _turn(self, x: Tensor, by: Tensor) -> Tensor:
        """Rotary embedding of ``x`` ``[n, D]`` by positions ``by`` ``[n]``, written down from the RoFormer paper."""
        config = self.model.config
        width = int(x.shape[-1] * config.rope_parameters.get("partial_rotary_factor", 1.0))
        base = config.rope_parameters["rope_theta"] ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angle = by[:, None] * base
        first, second = x[:, : width // 2], x[:, width // 2 : width]
        turned = (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin())
        return torch.cat((*turned, x[:, width:]), -1)


def _oracle_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, kvgate_oracle: Oracle, **rules: Any
) -> tuple[Tensor, None]:
    index = module.layer_idx
    if index not in kvgate_oracle.layers:
        empty = key.new_zeros(key.shape[1], 0, key.shape[3])
        kvgate_oracle.layers[index] = _Layer(
            empty, empty, empty[..., 0], [set() for _ in range(key.shape[1])], rules.get("sliding_window")
        )
    scale = rules.get("scaling") or query.shape[-1] ** -0.5
    out = kvgate_oracle.attend(index, query[0], key[0], value[0], scale, rules.get("softcap"))
    return out[None], None


@pytest.fixture(scope="session")
def oracle() -> Callable[[Tiny], Oracle]:
    AttentionInterface.register("kvgate_oracle", _oracle_attention)

    @cache
    def in_float64(model: Any) -> Any:
        made = copy.deepcopy(model).double()
        made.set_attn_implementation("kvgate_oracle")
        return made

    return lambda tiny: Oracle(in_float64(tiny.copy))


@pytest.fixture(scope="session")
def rule() -> type[Rule]:
    return Rule
