"""Policies and shadows in the serving loop: the protocol is the runner's, pages are all accounted for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from kvgate.compressors.evidence import Evidence, Keep
from kvgate.compressors.h2o import H2O
from kvgate.compressors.keydiff import KeyDiff
from kvgate.compressors.policy import Policy
from kvgate.compressors.snapkv import SnapKV
from kvgate.compressors.streaming_llm import StreamingLLM
from kvgate.engine.engine import Engine
from kvgate.engine.models import LoadedModel, wrap
from kvgate.engine.served import Beside
from kvgate.engine.serving import Server
from kvgate.engine.shadows import Compared
from kvgate.engine.sink import Greedy
from kvgate.lifecycle.config import ManagerConfig
from kvgate.lifecycle.prefix.value_density import ValueDensity
from kvgate.lifecycle.states import Spec, State

SHAPE = {
    "vocab_size": 211, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.3,
}  # fmt: skip
CONFIG = ManagerConfig(page_size=8, tokens_per_step=64, max_running=8)
HEAVY = H2O.for_budget(32)


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    torch.manual_seed(7)
    return wrap(LlamaForCausalLM(LlamaConfig(**SHAPE)).float(), None, name="tiny", weights_hash="tiny")


def prompts(count: int, length: int = 70) -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(1, 200, length + 7 * i).tolist() for i in range(count)]


def alone(model: LoadedModel, prompt: list[int], tokens: int, policy: Policy | None) -> list[int]:
    """Protocol whole_prompt by hand: all but the last prompt token exact, then the policy, then the rest."""
    engine = Engine(model, pages=800, page_size=8, prefill_chunk=64)
    row, _ = engine.prefill(prompt[:-1], needs=policy.needs if policy else frozenset())
    engine.switch(row, policy)
    found = prompt[-1:]
    while len(found) <= tokens:
        found.append(int(engine.extend([row], [found[-1:]])[0].argmax()))
    return found[1:]


def made(model: LoadedModel, blocks: int = 200, **options: object) -> tuple[Server, dict[str, Compared]]:
    seen: dict[str, Compared] = {}
    server = Server(
        Engine(model, pages=4 * blocks, page_size=8), CONFIG, lambda: 0.0, compared=seen.__setitem__, **options
    )
    return server, seen


def run(server: Server) -> None:
    while server.busy:
        server.step()
        server.store.check()
    assert not server.store.shadows
    assert server.store.available() == server.store.total


def test_a_policy_takes_over_as_in_the_protocol_that_was_judged(llama: LoadedModel) -> None:
    server, _ = made(llama)
    asked = prompts(6)
    policies: list[Policy | None] = [
        HEAVY, None, StreamingLLM.for_budget(24), H2O.for_budget(400), KeyDiff.for_budget(32, shape="model"),
        SnapKV.for_budget(40, window=8),
    ]  # fmt: skip
    for i, (prompt, policy) in enumerate(zip(asked, policies, strict=True)):
        server.submit(Spec(f"r{i}", len(prompt), 20), prompt, policy=policy)
    run(server)
    expected = [alone(llama, p, 20, policy) for p, policy in zip(asked, policies, strict=True)]
    assert [r.tokens for r in server.requests.values()] == expected
    assert expected[0] != alone(llama, asked[0], 20, None), "or the policy shows nothing"


def test_a_policy_row_holds_no_more_than_its_budget(llama: LoadedModel) -> None:
    server, _ = made(llama)
    prompt = prompts(1, 200)[0]
    server.submit(Spec("r", len(prompt), 40), prompt, policy=HEAVY)
    while server.requests["r"].state is not State.DECODE:
        server.step()
    server.step()
    (slot,) = server.store.rows
    assert server.store.blocks_held(slot) <= 5
    assert server.store.available() >= server.store.total - 6, "what it gave up can be promised to others"
    run(server)


def test_the_exact_answer_is_returned_and_its_shadow_is_compared_along_it(llama: LoadedModel) -> None:
    server, seen = made(llama)
    asked = prompts(3)
    for i, prompt in enumerate(asked):
        server.submit(Spec(f"r{i}", len(prompt), 20), prompt, beside=Beside(HEAVY, answer=True))
    run(server)
    for i, prompt in enumerate(asked):
        exact, policy = alone(llama, prompt, 20, None), alone(llama, prompt, 20, HEAVY)
        assert server.requests[f"r{i}"].tokens == exact
        found = seen[f"r{i}"]
        assert (found.tokens, found.missing) == (20, None)
        assert list(found.own or exact) == policy
        assert found.evicted > 0
        assert found.kl_max >= found.kl_mean > 0
        assert (found.agreed == 20) == (policy == exact)


def test_the_roles_can_be_the_other_way_round(llama: LoadedModel) -> None:
    server, seen = made(llama)
    prompt = prompts(1)[0]
    server.submit(Spec("r", len(prompt), 20), prompt, policy=HEAVY, beside=Beside(None, answer=True))
    run(server)
    assert server.requests["r"].tokens == alone(llama, prompt, 20, HEAVY)
    assert list(seen["r"].own or ()) == alone(llama, prompt, 20, None)


def test_a_policy_that_keeps_everything_agrees_everywhere(llama: LoadedModel) -> None:
    server, seen = made(llama)
    prompt = prompts(1)[0]
    server.submit(Spec("r", len(prompt), 20), prompt, beside=Beside(H2O.for_budget(500), answer=True))
    run(server)
    assert (seen["r"].agreed, seen["r"].own, seen["r"].evicted) == (20, None, 0)
    assert seen["r"].kl_max < 1e-5


def test_shadows_give_way_and_say_so(llama: LoadedModel) -> None:
    server, seen = made(llama, blocks=46)
    asked = prompts(4, 60)
    for i, prompt in enumerate(asked):
        server.submit(Spec(f"r{i}", len(prompt), 30), prompt, beside=Beside(HEAVY, answer=True))
    run(server)
    assert [r.tokens for r in server.requests.values()] == [alone(llama, p, 30, None) for p in asked]
    assert set(seen) == {"r0", "r1", "r2", "r3"}
    assert any(found.missing for found in seen.values())


def test_cancelling_takes_the_shadow_along(llama: LoadedModel) -> None:
    server, seen = made(llama)
    prompt = prompts(1)[0]
    server.submit(Spec("r", len(prompt), 50), prompt, beside=Beside(HEAVY, answer=True))
    for _ in range(8):
        server.step()
    server.cancel("r")
    server.store.check()
    assert seen["r"].missing == "the request cancelled"
    assert server.store.available() == server.store.total


class Broken(StreamingLLM):
    """Raises once the row has grown."""

    def decide(self, evidence: Evidence) -> Keep:
        if evidence.length > 80:
            raise RuntimeError("boom")
        return super().decide(evidence)


class Raising(Greedy):
    """Raises at the first token, or on the prompt."""

    def __init__(self, reads_prompt: bool) -> None:
        self.reads_prompt = reads_prompt

    def take(self, token: int, logits: Tensor) -> bool:
        raise RuntimeError("a sink broke")

    def read(self, first: int, logits: Tensor) -> None:
        raise RuntimeError("a sink broke")


def test_a_failing_row_fails_alone(llama: LoadedModel) -> None:
    server, seen = made(llama)
    asked = prompts(5)
    broken = Broken.for_budget(24)
    server.submit(Spec("r0", len(asked[0]), 20), asked[0], policy=broken)
    server.submit(Spec("r1", len(asked[1]), 20), asked[1])
    server.submit(Spec("r2", len(asked[2]), 20), asked[2], sink=Raising(False))
    server.submit(Spec("r3", len(asked[3]), 20), asked[3], sink=Raising(True))
    server.submit(Spec("r4", len(asked[4]), 20), asked[4], beside=Beside(broken))
    run(server)
    states = [r.state for r in server.requests.values()]
    assert states == [State.FAILED, State.FINISHED, State.FAILED, State.FAILED, State.FINISHED]
    assert [str(server.requests[id].error) for id in ("r0", "r2", "r3")] == ["boom", "a sink broke", "a sink broke"]
    assert server.requests["r1"].tokens == alone(llama, asked[1], 20, None)
    assert server.requests["r4"].tokens == alone(llama, asked[4], 20, None)
    assert "boom" in str(seen["r4"].missing)


class Reader(Greedy):
    """Keeps the prompt's logits."""

    reads_prompt = True

    def __init__(self) -> None:
        self.seen: dict[int, Tensor] = {}

    def read(self, first: int, logits: Tensor) -> None:
        self.seen.update(enumerate(logits, first))


def test_prompt_logits_are_all_handed_out_whatever_is_cached(llama: LoadedModel) -> None:
    server, _ = made(llama, retention=ValueDensity())
    prompt = prompts(1, 100)[0]
    engine = Engine(llama, pages=400, page_size=8)
    every = engine.extend([engine.begin()], [prompt], every=True)
    for name in ("first", "second"):
        reader = Reader()
        server.submit(Spec(name, len(prompt), 2), prompt, sink=reader)
        run(server)
        assert sorted(reader.seen) == list(range(100))
        torch.testing.assert_close(torch.stack([reader.seen[i] for i in range(100)]), every, rtol=1e-4, atol=1e-4)


def test_answers_enter_the_prefix_cache_and_evicted_ones_do_not(llama: LoadedModel) -> None:
    for policy, hits in ((None, 88), (HEAVY, 0)):
        server, _ = made(llama, retention=ValueDensity())
        prompt = prompts(1)[0]
        server.submit(Spec("a", len(prompt), 21), prompt, policy=policy)
        run(server)
        longer: Sequence[int] = [*prompt, *server.requests["a"].tokens, 5, 6]
        server.submit(Spec("b", len(longer), 4), list(longer))
        run(server)
        assert server.requests["b"].hit == hits
