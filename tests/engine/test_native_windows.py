"""Windows that the model declares itself: pages behind them are freed in the exact run too, and nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvgate.compressors.sliding_window import SlidingWindow
from kvgate.engine.probe import attention_shape

Fixture = Callable[..., Any]
WINDOW = 12


@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + 8, 40])
def test_the_exact_run_holds_a_window_and_stays_exact(
    tiny: Fixture, text: Fixture, live_tokens: Fixture, length: int
) -> None:
    """The query at position p attends p - w + 1 .. p, so with p still to come w - 1 tokens must be there."""
    model, tokens = tiny("mistral"), text(60)
    engine = model.engine()
    row, last = engine.prefill(tokens[:length])
    torch.testing.assert_close(last, model.logits(tokens[:length])[-1], rtol=0, atol=1e-4)
    first = max(0, length - WINDOW + 1)
    assert live_tokens(engine, row) == [[list(range(first, length))] * 2] * 2
    assert engine.resident_pages(row) == 4 * (-(-length // 8) - first // 8)
    want = model.logits(tokens)
    for at in range(length, 60):
        got = engine.extend([row], [[tokens[at]]])[0]
        torch.testing.assert_close(got, want[at], rtol=0, atol=1e-4)
        assert int(engine.tables.counts[row.id].max()) <= 3
    assert not row.tainted, "what the model itself never attends again is no approximation"
    assert row.evicted == 0
    engine.release(row)
    engine.tables.check()
    assert engine.tables.pool.free == engine.tables.pool.total


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3", "qwen2_window"])
def test_only_the_declared_layers_are_freed(
    tiny: Fixture, text: Fixture, live_tokens: Fixture, architecture: str
) -> None:
    model, tokens = tiny(architecture), text(50)
    engine = model.engine(prefill_chunk=9)
    row, last = engine.prefill(tokens)
    torch.testing.assert_close(last, model.logits(tokens)[-1], rtol=0, atol=1e-4)
    for layer, window in enumerate(engine.info.native_windows):
        first = 0 if window is None else 50 - WINDOW + 1
        assert live_tokens(engine, row)[layer] == [list(range(first, 50))] * 2
    assert sorted(str(window) for window in engine.info.native_windows) == [str(WINDOW), "None"]


@pytest.mark.parametrize("window, lossless", [(WINDOW - 1, False), (WINDOW, True), (WINDOW + 1, True)])
def test_a_policy_window_that_covers_the_native_one_is_lossless(
    tiny: Fixture, text: Fixture, window: int, lossless: bool
) -> None:
    model, tokens = tiny("mistral"), text(50)
    engine = model.engine()
    parent, _ = engine.prefill(tokens[:30])
    row = engine.fork(parent, SlidingWindow(window))
    engine.evict(row)
    want = model.logits(tokens)
    worst = 0.0
    for at, count in ((30, 1), (31, 9), (40, 1), (41, 1)):
        got = engine.extend([row], [tokens[at : at + count]], every=True)
        worst = max(worst, float((got - want[at : at + count]).abs().max()))
    assert (worst < 1e-4) == lossless
    assert worst < 1e-4 or worst > 1e-2
    assert row.tainted != lossless


def test_mass_follows_when_pages_behind_the_window_go(tiny: Fixture, text: Fixture) -> None:
    model, tokens = tiny("gemma2"), text(50)
    engine = model.engine()
    row, _ = engine.prefill(tokens[:30], needs=frozenset({"mass"}))
    for token in tokens[30:]:
        engine.extend([row], [[token]])
    model.copy.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model.copy(torch.tensor([tokens]), output_attentions=True).attentions
    seen = engine.evidence(row)
    for layer in range(2):
        for head in range(2):
            want = attentions[layer][0, 3 * head : 3 * head + 3].sum((0, 1))
            live = seen.live[layer, head]
            where = seen.positions[layer, head][live].long()
            torch.testing.assert_close(seen.mass[layer, head][live], want[where], rtol=1e-4, atol=1e-4)
            assert (seen.mass[layer, head][~live] == 0).all()


@pytest.mark.parametrize(
    "architecture, changes, expected",
    [
        ("mistral", {}, (12, 12)),
        ("mistral_full", {}, (None, None)),
        ("qwen2", {"sliding_window": 12}, (None, None)),
        ("qwen2_window", {}, (None, 12)),
        ("gemma2", {}, (12, None)),
        ("llama", {}, (None, None)),
        ("llama", {"sliding_window": 12}, (None, None)),  # a leftover that its layers ignore
        ("phi3", {}, (12, 12)),
    ],
)
def test_windows_are_what_the_layers_attend(
    tiny: Fixture, architecture: str, changes: dict[str, Any], expected: tuple[int | None, ...]
) -> None:
    assert attention_shape(tiny(architecture, **changes).loaded.module, "tiny").windows == expected
