"""Every family the README names: paged logits are the model's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvgate.compressors.evidence import LastQueries
from kvgate.compressors.h2o import H2O
from kvgate.compressors.sliding_window import SlidingWindow
from kvgate.compressors.streaming_llm import StreamingLLM

FAMILIES = [
    "llama", "llama_multi_query", "qwen2", "qwen2_window", "qwen3", "mistral", "mistral_full", "gemma", "gemma2",
    "gemma3", "phi", "phi3", "smollm3", "granite", "cohere", "gpt_neox", "gpt2", "bigcode",
]  # fmt: skip
Text = Callable[..., list[int]]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_prefill_and_decode_give_the_model_s_own_logits(tiny: Callable[..., Any], text: Text, name: str) -> None:
    model, tokens = tiny(name), text(40)
    engine = model.engine()
    row, last = engine.prefill(tokens[:25])
    steps = [last, *(engine.extend([row], [[token]])[0] for token in tokens[25:])]
    for attention in ("eager", "sdpa") if name != "gemma2" else ("eager",):  # SDPA knows no softcap
        want = model.logits(tokens, attention)
        close(torch.stack(steps), want[24:])
    assert want.std() > 0.3, "nearly equal logits would prove nothing"
    engine.release(row)
    engine.tables.check()


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral", "phi", "gpt2"])
@pytest.mark.parametrize("chunk", [1, 5, 8, 24])
def test_prefill_in_chunks_is_prefill(
    tiny: Callable[..., Any], text: Text, live_tokens: Callable[..., Any], name: str, chunk: int
) -> None:
    model, tokens = tiny(name), text(43)
    engine = model.engine(prefill_chunk=chunk)
    row, last = engine.prefill(tokens, needs=frozenset({"mass", LastQueries(32)}))
    close(last, model.logits(tokens)[-1])
    whole = model.engine()
    other, _ = whole.prefill(tokens, needs=frozenset({"mass", LastQueries(32)}))
    assert row.mass is not None
    assert other.mass is not None
    assert live_tokens(engine, row) == live_tokens(whole, other)
    mass = [by_position(run.evidence(r)) for run, r in ((engine, row), (whole, other))]
    torch.testing.assert_close(mass[0], mass[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(row.queries, other.queries, rtol=1e-4, atol=1e-4)


def by_position(seen: Any) -> torch.Tensor:
    """Mass ``[L, H, tokens]`` in order of position, zero where a token is not live."""
    found = torch.zeros(*seen.positions.shape[:2], seen.length)
    found.scatter_add_(-1, torch.where(seen.live, seen.positions, 0).long(), seen.mass * seen.live)
    return found


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3", "qwen2_window"])
def test_rows_of_many_lengths_and_policies_in_one_step(tiny: Callable[..., Any], text: Text, name: str) -> None:
    """Exact rows among evicting ones give the model's own logits, whichever order the rows come in."""
    model = tiny(name)
    engine = model.engine()
    lengths, added = (3, 30, 17, 8, 41), (4, 1, 9, 1, 2)
    texts = [text(length + more, seed) for seed, (length, more) in enumerate(zip(lengths, added, strict=True))]
    policies = [SlidingWindow(5), H2O(3, 4), StreamingLLM(4, 2)]
    rows, new = [], []
    for index, (length, tokens) in enumerate(zip(lengths, texts, strict=True)):
        row, _ = engine.prefill(tokens[:length], needs=frozenset({"mass"}))
        fork = engine.fork(row, policies[index % 3])
        rows += [fork, row]
        new += [tokens[length:], tokens[length:]]
    every = engine.extend(rows, new, every=True)
    starts = [0]
    for part in new:
        starts.append(starts[-1] + len(part))
    for index, (length, tokens) in enumerate(zip(lengths, texts, strict=True)):
        exact = 2 * index + 1
        close(every[starts[exact] : starts[exact + 1]], model.logits(tokens)[length:])
    last = engine.extend(rows, [[5]] * len(rows))
    for index, tokens in enumerate(texts):
        close(last[2 * index + 1], model.logits([*tokens, 5])[-1])
    for row in rows:
        engine.release(row)
    engine.tables.check()
    assert engine.tables.pool.free == engine.tables.pool.total


def test_evidence_shows_the_model_s_keys_values_queries_and_attention(tiny: Callable[..., Any], text: Text) -> None:
    """What an outside policy may build on (SnapKV needs queries and keys) is what transformers itself computes."""
    model, tokens = tiny("llama"), text(40)
    engine = model.engine()
    everything = frozenset({"mass", LastQueries(32), "keys", "values"})
    row, _ = engine.prefill(tokens[:21], needs=everything)
    engine.extend([row], [tokens[21:24]])
    for token in tokens[24:]:
        engine.extend([row], [[token]])
    seen = engine.evidence(row)
    model.copy.set_attn_implementation("eager")
    with torch.no_grad():
        want = model.copy(torch.tensor([tokens]), use_cache=True, output_attentions=True)
    for layer in range(2):
        cached = want.past_key_values.layers[layer]
        for head in range(2):
            live = seen.live[layer, head]
            assert sorted(seen.positions[layer, head][live].tolist()) == list(range(40))
            where = seen.positions[layer, head][live].long()
            close(seen.keys()[layer, head][live], cached.keys[0, head, where])
            close(seen.values()[layer, head][live], cached.values[0, head, where])
            mass = want.attentions[layer][0, 3 * head : 3 * head + 3].double().sum((0, 1))
            torch.testing.assert_close(seen.mass[layer, head][live].double(), mass[where], rtol=1e-4, atol=1e-4)
    assert seen.queries.shape == (2, 6, 32, 8), "the last 32 queries, however they were fed"
    assert seen.queries.untyped_storage().nbytes() == 4 * seen.queries.numel(), "and no view of a whole prefill"
    query_key = torch.einsum("lqwd,lqnd->lqwn", seen.queries, seen.keys().repeat_interleave(3, 1)) * 8**-0.5
    where = torch.where(seen.live, seen.positions, 10_000).repeat_interleave(3, 1)
    hidden = where[:, :, None, :] > torch.arange(8, 40)[None, None, :, None]
    weights = query_key.masked_fill(hidden, -torch.inf).softmax(-1)
    for layer in range(2):
        placed = torch.zeros(6, 32, 40).scatter_add_(
            -1, where[layer].clamp_max(39).long()[:, None].expand_as(weights[layer]), weights[layer]
        )
        close(placed, want.attentions[layer][0, :, 8:])
