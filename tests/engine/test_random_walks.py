"""Random operations on many rows at once, each row beside an oracle of its own, with poisoned memory in between."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvgate.compressors.evidence import Span
from kvgate.compressors.h2o import H2O
from kvgate.compressors.policy import Policy
from kvgate.compressors.sliding_window import SlidingWindow
from kvgate.compressors.streaming_llm import StreamingLLM
from kvgate.lifecycle.pool import OutOfPages

Fixture = Callable[..., Any]
PROTECTED = (Span(0, 3),)
POLICIES: list[Policy] = [
    SlidingWindow(7), SlidingWindow(40), StreamingLLM(6, 4), StreamingLLM(9, 2, "rebased"), H2O(6, 4), H2O(9, 0),
]  # fmt: skip


class Walk:
    """The rows of one engine, each a pair of row and oracle. Every operation checks both."""

    def __init__(self, model: Any, oracle: Any, rule: Any, live_tokens: Fixture, seed: int, pages: int) -> None:
        self.random = random.Random(seed)
        self.engine = model.engine(pages=pages)
        self.new_oracle, self.rule, self.live_tokens = lambda: oracle(model), rule, live_tokens
        self.rows: list[tuple[Any, Any]] = []
        self.refused = 0

    def text(self, most: int) -> list[int]:
        return [self.random.randrange(3, 97) for _ in range(self.random.randint(1, most))]

    def some(self) -> list[int]:
        return self.random.sample(range(len(self.rows)), self.random.randint(1, len(self.rows)))

    def prefill(self) -> None:
        tokens = self.text(30)
        row, last = self.engine.prefill(tokens, needs=frozenset({"mass"}), protected=PROTECTED)
        oracle = self.new_oracle()
        want = oracle.feed(tokens)
        torch.testing.assert_close(last.double(), want[-1], rtol=0, atol=3e-4)
        self.rows.append((row, oracle))

    def fork(self) -> None:
        row, oracle = self.random.choice(self.rows)
        able = [policy for policy in POLICIES if policy.needs <= row.collect]
        policy = self.random.choice(able) if row.policy is None and self.random.random() < 0.8 else None
        child, twin = self.engine.fork(row, policy), copy.copy(oracle)
        twin.layers = copy.deepcopy(oracle.layers)
        if policy is not None:
            spans = policy.forced_spans(PROTECTED)
            twin.rule = self.rule(
                budget=policy.budget,
                forced=frozenset(token for span in spans for token in range(span.start, span.end)),
                heavy=policy.heavy if isinstance(policy, H2O) else None,
                rebased=isinstance(policy, StreamingLLM) and policy.positions == "rebased",
            )
            if self.random.random() < 0.7:
                self.engine.evict(child, compact=self.random.random() < 0.5)
                twin.evict()
        self.rows.append((child, twin))

    def extend(self) -> None:
        chosen = [self.rows[index] for index in self.some()]
        one = self.random.random() < 0.6
        new = [self.text(1 if one else 9) for _ in chosen]
        got = self.engine.extend([row for row, _ in chosen], new, every=True)
        want = torch.cat([oracle.feed(tokens) for (_, oracle), tokens in zip(chosen, new, strict=True)])
        torch.testing.assert_close(got.double(), want, rtol=0, atol=3e-4)

    def compact(self) -> None:
        self.engine.compact(self.random.choice(self.rows)[0])

    def release(self) -> None:
        if len(self.rows) > 2:
            self.engine.release(self.rows.pop(self.random.randrange(len(self.rows)))[0])

    def step(self) -> None:
        operations = [self.fork, self.fork, self.extend, self.extend, self.extend, self.compact, self.release]
        operation = self.random.choice(
            [*operations, self.prefill] if len(self.rows) < 7 else [self.extend, self.release]
        )
        try:
            operation()
        except OutOfPages:
            self.refused += 1
        self.check()

    def check(self) -> None:
        self.engine.tables.check()
        free = torch.from_numpy(self.engine.tables.pool.ref == 0)
        self.engine.store.k[free] = torch.nan
        self.engine.store.v[free] = torch.nan
        for row, oracle in self.rows:
            live = self.live_tokens(self.engine, row)
            assert live == [[sorted(head) for head in oracle.layers[layer].live] for layer in range(len(live))]
            if row.mass is not None:
                seen = self.engine.evidence(row)
                for layer, heads in oracle.layers.items():
                    for head in range(len(heads.live)):
                        keep = seen.live[layer, head]
                        where = seen.positions[layer, head][keep].long()
                        got = seen.mass[layer, head][keep].double()
                        torch.testing.assert_close(got, heads.mass[head, where], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("seed", range(5))
def test_any_sequence_of_operations_agrees_with_the_oracles(
    tiny: Fixture, oracle: Fixture, rule: Fixture, live_tokens: Fixture, seed: int
) -> None:
    walk(tiny, oracle, rule, live_tokens, seed, steps=25, pages=1000)


@pytest.mark.parametrize("seed", range(5, 8))
def test_a_pool_too_small_refuses_steps_and_breaks_nothing(
    tiny: Fixture, oracle: Fixture, rule: Fixture, live_tokens: Fixture, seed: int
) -> None:
    refused = walk(tiny, oracle, rule, live_tokens, seed, steps=30, pages=48)
    assert refused > 0, "the pool was meant to run out"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8, 20))
def test_longer_walks(tiny: Fixture, oracle: Fixture, rule: Fixture, live_tokens: Fixture, seed: int) -> None:
    walk(tiny, oracle, rule, live_tokens, seed, steps=60, pages=1000 if seed % 2 else 90)


def walk(tiny: Fixture, oracle: Fixture, rule: Fixture, live_tokens: Fixture, seed: int, steps: int, pages: int) -> int:
    made = Walk(tiny("llama"), oracle, rule, live_tokens, seed, pages)
    made.prefill()
    made.fork()
    for _ in range(steps):
        made.step()
    for row, _ in made.rows:
        made.engine.release(row)
    made.engine.tables.check()
    assert made.engine.tables.pool.free == pages
    return made.refused
