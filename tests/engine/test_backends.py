"""The engine on every backend of the kernels against the engine on torch: same tokens, same kept slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch

from kvgate.compressors.evidence import Span
from kvgate.compressors.h2o import H2O
from kvgate.compressors.policy import Policy
from kvgate.compressors.sliding_window import SlidingWindow
from kvgate.compressors.streaming_llm import StreamingLLM
from kvgate.engine.generate import generate
from kvgate.kernels.types import Backend

Fixture = Callable[..., Any]
POLICIES: list[Policy | None] = [
    None, SlidingWindow(11), StreamingLLM(8, 4), StreamingLLM(8, 4, "rebased"), H2O(6, 6),
]  # fmt: skip


OTHERS = [
    pytest.param(name, marks=[pytest.mark.slow] if name == "triton" else [])  # interpreted on a CPU
    for name in get_args(Backend)
    if name != "torch"
]


@pytest.mark.parametrize("backend", OTHERS)
@pytest.mark.parametrize("architecture", ["llama_one_layer", "gemma2"])
def test_every_backend_gives_the_tokens_torch_gives(
    tiny: Fixture, text: Fixture, live_tokens: Fixture, architecture: str, backend: str
) -> None:
    """Prefill with mass, eviction with compaction, a chunk on the evicted cache, copy on write in a fork, decode."""
    if backend == "triton":
        pytest.importorskip("triton", reason="the Triton backend needs triton")
    model, tokens = tiny(architecture), text(40)
    seen = {}
    for name in ("torch", backend):
        engine = model.engine(pages=300, backend=name)
        parent, last = engine.prefill(tokens[:26], needs=frozenset({"mass"}), protected=(Span(0, 2),))
        rows = [engine.fork(parent, policy) for policy in POLICIES]
        for row in rows[1:]:
            engine.evict(row, compact=True)
        chunk = engine.extend(rows, [tokens[26 : 26 + 2 + index] for index in range(len(rows))], every=True)
        forks = [engine.fork(row) for row in rows]
        stepped = engine.extend(forks, [[tokens[35]]] * len(forks))
        answers = generate(engine, forks, stepped, [4] * len(forks), [frozenset[int]()] * len(forks))
        after = engine.extend(rows, [[tokens[36]]] * len(rows))
        seen[name] = (torch.cat((last[None], chunk, stepped, after)), answers, [
            live_tokens(engine, row) for row in (*rows, *forks)
        ])  # fmt: skip
        engine.tables.check()
    torch.testing.assert_close(seen[backend][0], seen["torch"][0], rtol=0, atol=1e-4)
    assert seen[backend][1:] == seen["torch"][1:]


def test_an_unknown_backend_is_refused(tiny: Fixture, text: Fixture) -> None:
    with pytest.raises(ValueError, match="backend 'cuda' is unknown: torch"):
        tiny("llama").engine(backend="cuda").prefill(text(4))
