"""The exact run, and what the policies keep, on the embedded model and real prompts, against transformers itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers

from kvgate.compressors.h2o import H2O
from kvgate.compressors.streaming_llm import StreamingLLM
from kvgate.engine.embedded import embedded_folder
from kvgate.engine.engine import Engine
from kvgate.engine.generate import generate
from kvgate.engine.models import LoadedModel, load_model
from kvgate.evals.data.items import Item
from kvgate.evals.data.tokens import Tokens
from kvgate.evals.suites.base import BuildSpec
from kvgate.evals.suites.catalog import suite_class

pytestmark = pytest.mark.slow
Fixture = Callable[..., Any]
NEW_TOKENS = 8


@pytest.fixture(scope="module")
def folder() -> str:
    try:
        return str(embedded_folder())
    except ValueError as error:
        pytest.skip(f"the embedded model is not there: {error}")


@pytest.fixture(scope="module")
def loaded(folder: str) -> LoadedModel:
    return load_model(dtype="float32")


@pytest.fixture(scope="module")
def reference(folder: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")


QUESTIONS = (
    "What is the capital of Italy?",
    "Write one sentence about the sea.",
    "List three colours.",
    "How many days does a leap year have, and why?",
    "Translate 'good morning' into French.",
    "Explain in a few words what a page table does.",
)
# suite -> (context length, tasks; none means all) of what is built; the questions are asked with each item
BUILT: dict[str, list[tuple[int, tuple[str, ...]]]] = {
    "retrieval": [(128, ()), (640, ("single",))],
    "code": [(96, ()), (448, ("constant",))],
    "multi_turn": [(192, ())],
    "instructions": [(96, ())],
}


@pytest.fixture(scope="module")
def prompts(loaded: LoadedModel) -> dict[str, list[list[int]]]:
    """Prompts of about 40 to 670 tokens: chat questions, and what the suites make, question included."""
    tokens = Tokens(loaded.tokenizer)
    found = {name: [prompt_of(item) for item in build(tokens, name)] for name in BUILT}
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    found["questions"] = [
        loaded.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        for chat in chats
    ]
    assert sum(map(len, found.values())) >= 20
    return found


def build(tokens: Tokens, name: str) -> list[Item]:
    suite = suite_class(name)()
    return [
        item
        for length, tasks in BUILT[name]
        for item in suite.build(tokens, BuildSpec(counts={length: 1}, tasks=tasks, seed=3))
    ]


def prompt_of(item: Item) -> list[int]:
    return [*item.context, *item.turns[0].prompt]


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def engine_for(loaded: LoadedModel, tokens: int) -> Engine:
    return Engine(loaded, pages=90 * (tokens // 16 + 40))


@pytest.mark.parametrize("kind", ["questions", *BUILT])
def test_greedy_tokens_and_logits_are_those_of_transformers(
    loaded: LoadedModel, reference: Any, prompts: dict[str, list[list[int]]], kind: str
) -> None:
    """All rows in one batch, among them rows whose policy has room for everything."""
    chosen = prompts[kind]
    engine = engine_for(loaded, 3 * sum(map(len, chosen)))
    prefilled = [engine.prefill(prompt, needs=frozenset({"mass"})) for prompt in chosen]
    rows = [row for row, _ in prefilled]
    logits = torch.stack([last for _, last in prefilled])
    roomy = []
    for row in rows[::4]:
        budget = row.length + NEW_TOKENS
        policies = (H2O.for_budget(budget), StreamingLLM.for_budget(budget, positions="rebased"))
        roomy += [engine.fork(row, policy) for policy in policies]
    for row in roomy:
        engine.evict(row, compact=True)
    everyone = [*rows, *roomy]
    first = torch.cat((logits, logits[::4].repeat_interleave(2, 0)))
    stops = frozenset(loaded.info.stop_ids)
    answers = generate(engine, everyone, first, [NEW_TOKENS] * len(everyone), [stops] * len(everyone))

    for prompt, last, answer in zip(chosen, logits, answers, strict=False):
        made = reference.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
            max_new_tokens=NEW_TOKENS, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        want = [token for token in made.sequences[0, len(prompt) :].tolist() if token not in stops]
        assert answer.tokens == want
        torch.testing.assert_close(last, made.logits[0][0], rtol=0, atol=1e-3)
    for index, answer in enumerate(answers[len(rows) :]):
        assert answer == answers[4 * (index // 2)]
    assert not any(row.tainted for row in everyone)
    for row in everyone:
        engine.release(row)
    engine.tables.check()


def test_h2o_keeps_what_a_float64_attention_matrix_says(
    loaded: LoadedModel, folder: str, prompts: dict[str, list[list[int]]], live_tokens: Fixture
) -> None:
    prompt = prompts["retrieval"][0]
    policy = H2O.for_budget(len(prompt) // 2)
    engine = engine_for(loaded, 2 * len(prompt))
    parent, _ = engine.prefill(prompt, needs=policy.needs)
    row = engine.fork(parent, policy)
    engine.evict(row, compact=True)

    double = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    attentions = double(torch.tensor([prompt]), output_attentions=True).attentions
    ties = 0
    for layer, heads in enumerate(live_tokens(engine, row)):
        mass = attentions[layer][0].double().unflatten(0, (3, 3)).sum((1, 2))
        for head, kept in enumerate(heads):
            recent = set(range(len(prompt) - policy.recent, len(prompt)))
            others = sorted(set(range(len(prompt))) - recent, key=lambda token: (-float(mass[head, token]), token))
            want = recent | set(others[: policy.heavy])
            assert len(kept) == policy.budget
            threshold = float(mass[head, others[policy.heavy - 1]])
            for token in want ^ set(kept):
                assert float(mass[head, token]) == pytest.approx(threshold, rel=1e-4), "no tie, but another token"
                ties += 1
    assert ties <= 0.001 * policy.budget * 90, "almost everywhere the sets are equal outright"


def test_streaming_llm_at_half_of_1494_tokens(loaded: LoadedModel, live_tokens: Fixture) -> None:
    """Four sinks and {751..1493}, in every layer and head, and the pages of the rest are given back."""
    spec = BuildSpec(counts={1700: 1}, tasks=("single",))
    item = suite_class("retrieval")().build(Tokens(loaded.tokenizer), spec)[0]
    engine = engine_for(loaded, 2 * 1494)
    parent, _ = engine.prefill(item.context[:1494])
    row = engine.fork(parent, StreamingLLM.for_budget(747))
    engine.evict(row, compact=True)
    assert live_tokens(engine, row) == [[[*range(4), *range(751, 1494)]] * 3] * 30
    assert engine.resident_pages(row) == 90 * -(-747 // 16)
    assert engine.resident_pages(parent) == 90 * -(-1494 // 16)
