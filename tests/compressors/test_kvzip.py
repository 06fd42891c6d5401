"""KVzip's repetitions and what it makes of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvgate.compressors.evidence import Evidence, Model, Observed, Span
from kvgate.compressors.kvzip import CHUNK, OVERLAP, PROMPT, REPEAT, RESUME, KVzip

HEADS, GROUP, DIM = 2, 2, 4


def turn(x: Tensor, by: Tensor, layer: int) -> Tensor:
    raise AssertionError("kvzip turns nothing")


def test_the_context_is_repeated_chunk_by_chunk_and_the_largest_probability_counts() -> None:
    length = CHUNK + 30
    draw = torch.Generator().manual_seed(0)
    keys = torch.randn(1, HEADS, length, DIM, generator=draw)
    keys[..., 5, :] = torch.nan
    live = torch.ones(1, HEADS, length, dtype=torch.bool)
    live[..., 5] = False
    tokens = list(range(1000, 1000 + length))
    said: list[tuple[list[int], Observed]] = []

    def probe(ids: Sequence[int]) -> Observed:
        queries = torch.randn(1, HEADS * GROUP, len(ids), DIM, generator=draw)
        said.append((list(ids), Observed(queries, torch.full(queries.shape[:3], 3.0), length)))
        return said[-1][1]

    model = Model(0.5, None, (None,), lambda text: {REPEAT: [1, 2], RESUME: [3]}[text], turn)
    positions = torch.arange(length, dtype=torch.int32).expand(1, HEADS, length)
    seen = Evidence(positions, live, length, keys=lambda: keys, tokens=tokens, probe=probe, model=model)

    found = KVzip(100).score(seen)

    assert max(len(ids) for ids, _ in said) <= KVzip(100).probe_tokens(length)
    assert max(len(text) for text in (REPEAT, RESUME)) <= PROMPT, "even a tokenizer of bytes makes no more"
    assert [ids for ids, _ in said] == [
        [1, 2, *tokens[:CHUNK]],
        [3, *tokens[CHUNK - OVERLAP : CHUNK], *tokens[CHUNK:]],
    ]
    want = torch.zeros(HEADS, length)
    for _, observed in said:
        queries = observed.queries[0].view(HEADS, -1, DIM)
        want = torch.maximum(want, (0.5 * queries @ keys[0].transpose(1, 2) - 3.0).exp().amax(1))
    want[:, 5] = 0
    torch.testing.assert_close(found[0], want)


def test_sinks_stay_and_count() -> None:
    assert KVzip.smallest_budget() == 5
    assert KVzip.smallest_budget(sinks=0) == 1
    assert KVzip(9).forced_spans((Span(7, 8),)) == (Span(0, 4), Span(7, 8))
    assert KVzip(9, sinks=0).forced_spans(()) == ()
