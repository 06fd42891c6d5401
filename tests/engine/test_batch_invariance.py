"""What a row gets does not depend on who else is in the batch, in bf16 too; in strict order not on how its tokens were
fed either. All comparisons are of bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from kvgate.compressors.h2o import H2O
from kvgate.compressors.sliding_window import SlidingWindow
from kvgate.compressors.streaming_llm import StreamingLLM
from kvgate.engine.engine import Engine
from kvgate.engine.models import LoadedModel, load_model, wrap
from kvgate.engine.tiling import Tiled
from kvgate.kernels import native

Fixture = Callable[..., Any]
POLICIES = [None, SlidingWindow(9), H2O(4, 5), StreamingLLM(9, 2)]

pytestmark = pytest.mark.skipif(native.library() is None, reason="the torch decode kernel reads rows together")


@pytest.fixture
def halved(tiny: Fixture) -> Callable[[str, str], LoadedModel]:
    """A tiny model in bf16, wide enough that products of 1, 32 and 48 rows are blocked differently."""

    def make(name: str, numerics: str) -> LoadedModel:
        wide = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
        if name == "gpt2":
            wide = {"n_embd": 576, "n_head": 9, "num_key_value_heads": 9}
        module = copy.deepcopy(tiny(name, **wide).copy).to(torch.bfloat16)
        return wrap(module, None, name=name, numerics=numerics)

    return make


def engine_of(loaded: LoadedModel) -> Engine:
    return Engine(loaded, pages=9000, page_size=16)


def alone(loaded: LoadedModel, parts: list[list[int]], policy: Any) -> list[torch.Tensor]:
    """Logits of every token, fed part by part to a row that has the engine for itself."""
    engine = engine_of(loaded)
    row = started(engine, policy)
    return [engine.extend([row], [part], every=True) for part in parts]


def started(engine: Engine, policy: Any) -> Any:
    row = engine.begin(needs=policy.needs if policy else frozenset())
    return engine.fork(row, policy) if policy else row


@pytest.mark.parametrize("numerics", ["batch", "order"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_a_row_alone_is_a_row_beside_others(halved: Fixture, text: Fixture, name: str, numerics: str) -> None:
    """First chunk, second chunk and decode, each policy, beside rows that are fed one token, several, or start."""
    loaded = halved(name, numerics)
    texts = [text(36, seed) for seed in range(len(POLICIES))]
    cuts = [0, 24, 30, *range(31, 37)]
    parts = [[tokens[a:b] for a, b in pairwise(cuts)] for tokens in texts]
    want = [alone(loaded, own, policy) for own, policy in zip(parts, POLICIES, strict=True)]
    engine = engine_of(loaded)
    rows = [started(engine, policy) for policy in POLICIES]
    crowd = [engine.prefill(text(20 + seed, 50 + seed))[0] for seed in range(40)]
    for step in range(len(cuts) - 1):
        beside = [*crowd[: step * 5], engine.begin()]
        new = [[5] * (1 + (index + step) % 3) for index in range(len(beside))]
        mine = [own[step] for own in parts]
        got = engine.extend([*beside, *rows], [*new, *mine], every=True)
        at = sum(map(len, new))
        for index, own in enumerate(mine):
            assert torch.equal(got[at : at + len(own)], want[index][step]), (step, POLICIES[index])
            at += len(own)


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_in_strict_order_it_does_not_matter_how_tokens_are_fed(halved: Fixture, text: Fixture, name: str) -> None:
    """A prompt at once, in chunks or token by token, and the answer recomputed after a preemption."""
    loaded, tokens = halved(name, "order"), text(150)
    one_by_one = torch.cat(alone(loaded, [[token] for token in tokens], None))
    for size in (150, 64, 7):
        chunks = [tokens[at : at + size] for at in range(0, 150, size)]
        assert torch.equal(torch.cat(alone(loaded, chunks, None)), one_by_one), size


def test_rows_with_mass_in_strict_order_keep_the_same_tokens(halved: Fixture, text: Fixture) -> None:
    loaded, tokens = halved("llama", "order"), text(60)
    kept = []
    for cuts in ([0, 40], [0, 13, 40]):
        engine = engine_of(loaded)
        row = engine.begin(needs=frozenset({"mass"}))
        for a, b in pairwise(cuts):
            engine.extend([row], [tokens[a:b]])
        fork = engine.fork(row, H2O(6, 6))
        engine.evict(fork)
        kept.append((engine.evidence(fork).live, row.mass))
    assert torch.equal(kept[0][0], kept[1][0])
    torch.testing.assert_close(kept[0][1][..., :40], kept[1][1][..., :40], rtol=1e-5, atol=1e-6)


def test_tiles_are_the_plain_layer(tiny: Fixture) -> None:
    for name in ("llama", "gpt2"):
        plain = copy.deepcopy(tiny(name).copy)
        tiled = wrap(copy.deepcopy(plain), None, name=name, numerics="batch").module
        assert sum(isinstance(part, Tiled) for part in tiled.modules()) > 4
        tokens = torch.arange(3, 90)[None]
        tiled.set_attn_implementation("eager")
        with torch.no_grad():
            torch.testing.assert_close(tiled(tokens).logits, plain(tokens).logits, rtol=1e-5, atol=1e-5)
        assert set(tiled.state_dict()) == set(plain.state_dict()), "what is saved has the same names"


def test_packed_tiles_are_as_exact_as_the_plain_bf16_product(halved: Fixture) -> None:
    for name in ("llama", "gpt2"):
        layers = [part for part in halved(name, "batch").module.modules() if isinstance(part, Tiled)]
        for layer in layers:
            x = torch.randn(70, layer.in_features, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
            weight = layer.weight if layer.transposed else layer.weight.t()
            with torch.no_grad():
                want = x.double() @ weight.double() + (0 if layer.bias is None else layer.bias.double())
                apart = (layer(x).double() - want).abs()
            assert float((apart / (want.abs() + want.std())).max()) < 2**-7, "one rounding to bf16, of exact sums"


def test_changed_weights_are_packed_again(halved: Fixture) -> None:
    layer = halved("llama", "batch").module.model.layers[0].self_attn.q_proj
    assert isinstance(layer, Tiled)
    x = torch.randn(3, 576).to(torch.bfloat16)
    with torch.no_grad():
        before = layer(x)
        layer.weight.mul_(2)
        torch.testing.assert_close(layer(x), before * 2, rtol=2e-2, atol=2e-2)
        assert torch.equal(copy.deepcopy(layer)(x), layer(x)), "a copy packs its own"


def test_unknown_numerics_are_refused() -> None:
    with pytest.raises(ValueError, match="choose one of fast, batch, order, portable"):
        load_model(numerics="exact")
    with pytest.raises(ValueError, match="needs dtype float32"):
        load_model(numerics="portable")


@pytest.mark.slow
def test_embedded_model_in_bf16_answers_the_same_alone_and_in_a_crowd() -> None:
    loaded = load_model()
    assert loaded.info.numerics == "batch", "the default"
    seed = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 40000, (40 + 9 * i,), generator=seed).tolist() for i in range(40)]

    def answers(prompts: list[list[int]]) -> list[list[int]]:
        engine = Engine(loaded, pages=90 * 40 * 30)
        rows, logits = zip(*(engine.prefill(prompt) for prompt in prompts), strict=True)
        last, found = torch.stack(logits), [[] for _ in rows]
        for _ in range(12):
            chosen = last.argmax(-1).tolist()
            found = [[*own, token] for own, token in zip(found, chosen, strict=True)]
            last = engine.extend(rows, [[token] for token in chosen])
        return found

    crowd = answers(prompts)
    assert [answers([prompts[i]])[0] for i in (0, 20, 39)] == [crowd[i] for i in (0, 20, 39)]
