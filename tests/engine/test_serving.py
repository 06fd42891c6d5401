"""The manager under the real engine, on a tiny random model: whatever happens to a request, its tokens stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from kvgate.engine.engine import Engine
from kvgate.engine.measure import measured_recovery
from kvgate.engine.models import LoadedModel, wrap
from kvgate.engine.serving import Server
from kvgate.lifecycle.admission import Outcome
from kvgate.lifecycle.config import AdmissionConfig, EstimatorConfig, ManagerConfig, RecoveryConfig
from kvgate.lifecycle.metrics import ManagerMetrics
from kvgate.lifecycle.pool import State as PageState
from kvgate.lifecycle.prefix.value_density import ValueDensity
from kvgate.lifecycle.states import Spec, State
from kvgate.lifecycle.swap.area import HostArea
from kvgate.lifecycle.swap.disk import MemoryDisk

SHAPE = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


@dataclass
class Ticks:
    """A clock that moves by one on every look."""

    now: float = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    torch.manual_seed(5)
    return wrap(LlamaForCausalLM(LlamaConfig(**SHAPE)).float(), None, name="tiny", weights_hash="tiny")


@pytest.fixture(scope="module")
def mistral() -> LoadedModel:
    torch.manual_seed(6)
    config = MistralConfig(**SHAPE, sliding_window=24)
    return wrap(MistralForCausalLM(config).float(), None, name="windowed", weights_hash="windowed")


CONFIG = ManagerConfig(
    page_size=8,
    tokens_per_step=64,
    max_running=8,
    # Optimistic, so that the pool really runs full.
    admission=AdmissionConfig(z_without_host=0.0),
    estimator=EstimatorConfig(prior_mean=0.05, prior_weight=1000.0),
)
HOSTED = replace(CONFIG, recovery=RecoveryConfig(host_blocks=1000, prefill_tokens_per_s=1.0))


def prompts(count: int, length: int = 40) -> list[list[int]]:
    random = np.random.default_rng(3)
    return [random.integers(1, 200, length + 3 * i).tolist() for i in range(count)]


def alone(model: LoadedModel, prompt: list[int], tokens: int) -> list[int]:
    """Greedy tokens of the engine by itself, in a pool with room for everything."""
    engine = Engine(model, pages=400, page_size=8)
    row, logits = engine.prefill(prompt)
    found = [int(logits.argmax())]
    while len(found) < tokens:
        found.append(int(engine.extend([row], [found[-1:]])[0].argmax()))
    return found


@dataclass
class Run:
    server: Server
    ways: list[str] = field(default_factory=list)


def serve(
    model: LoadedModel,
    asked: list[list[int]],
    tokens: int,
    blocks: int,
    config: ManagerConfig,
    *,
    area: HostArea | None = None,
    each: Callable[[Run], None] | None = None,
) -> Run:
    server = Server(Engine(model, pages=4 * blocks, page_size=8), config, Ticks(), area=area)
    run = Run(server)
    for i, prompt in enumerate(asked):
        assert server.submit(Spec(f"r{i}", len(prompt), tokens), prompt).outcome is Outcome.QUEUE
    for _ in range(2000):
        if not len(server.manager.requests):
            break
        run.ways += [v.way.value for v in server.step().preempted]
        server.store.check()
        if each is not None:
            each(run)
    assert all(r.state is State.FINISHED for r in server.requests.values())
    assert server.engine.tables.pool.free == server.engine.tables.pool.total
    return run


def test_tokens_are_those_of_the_engine_alone(llama: LoadedModel) -> None:
    asked = prompts(3)
    run = serve(llama, asked, 12, 40, CONFIG)
    assert run.ways == []
    assert [r.tokens for r in run.server.requests.values()] == [alone(llama, p, 12) for p in asked]


def test_recomputed_sequences_continue_with_the_same_tokens(llama: LoadedModel) -> None:
    asked = prompts(4, 10)
    run = serve(llama, asked, 60, 20, CONFIG)
    assert "recompute" in run.ways
    assert [r.tokens for r in run.server.requests.values()] == [alone(llama, p, 60) for p in asked]


def test_swapped_sequences_continue_with_the_same_tokens(llama: LoadedModel) -> None:
    asked = prompts(4, 10)
    area = HostArea.open(MemoryDisk(), 1 << 24)
    run = serve(llama, asked, 60, 20, HOSTED, area=area)
    assert set(run.ways) == {"swap"}
    assert [r.tokens for r in run.server.requests.values()] == [alone(llama, p, 60) for p in asked]
    assert area.used == 0
    assert area.counts.bytes_in == area.counts.bytes_out > 0


def test_windowed_layers_swap_and_free_pages_behind_the_window(mistral: LoadedModel) -> None:
    asked = prompts(4, 10)

    def freed(run: Run) -> None:
        # 24 positions of a window touch at most 4 pages of 8, whatever the length.
        assert all(run.server.engine.tables.counts[row.id].max() <= 4 for row in run.server.store.rows.values())

    run = serve(mistral, asked, 60, 20, HOSTED, area=HostArea.open(MemoryDisk(), 1 << 24), each=freed)
    assert [r.tokens for r in run.server.requests.values()] == [alone(mistral, p, 60) for p in asked]


def test_a_corrupt_host_copy_is_recomputed_and_counted(llama: LoadedModel) -> None:
    disk = MemoryDisk()
    flipped: set[str] = set()

    def flip(run: Run) -> None:
        for name, data in disk.files.items():
            if name.endswith(".kv") and name not in flipped:
                flipped.add(name)
                disk.files[name] = data[:-1] + bytes([data[-1] ^ 1])

    asked = prompts(4, 10)
    area = HostArea.open(disk, 1 << 24)
    run = serve(llama, asked, 60, 20, HOSTED, area=area, each=flip)
    assert area.counts.corrupt > 0
    assert area.counts.bytes_out == 0
    assert [r.tokens for r in run.server.requests.values()] == [alone(llama, p, 60) for p in asked]


def test_a_prefix_hit_skips_prefill_and_gives_the_same_tokens(llama: LoadedModel) -> None:
    shared, (first, second) = prompts(1, 64)[0], prompts(2, 17)
    server = Server(Engine(llama, pages=400, page_size=8), CONFIG, Ticks(), retention=ValueDensity())
    for name, tail, tenant in (("a", first, "t1"), ("b", second, "t1"), ("c", second, "t2")):
        asked = shared + tail
        server.submit(Spec(name, len(asked), 10, tenant), asked)
        server.run()
        server.store.check()
        assert server.requests[name].tokens == alone(llama, asked, 10)
    assert server.requests["b"].hit == 64
    assert server.requests["c"].hit == 0, "another tenant's prefix is not shared"
    assert server.store.available() == server.store.total


def test_a_cached_prefix_gives_way_to_a_running_request(llama: LoadedModel) -> None:
    server = Server(Engine(llama, pages=4 * 20, page_size=8), CONFIG, Ticks(), retention=ValueDensity())
    asked = prompts(6, 60)
    for i, prompt in enumerate(asked):
        server.submit(Spec(f"r{i}", len(prompt), 8), prompt)
        server.run()
        server.store.check()
    assert server.store.cache is not None
    assert server.store.cache.counts.evicted > 0
    assert [r.tokens for r in server.requests.values()] == [alone(llama, p, 8) for p in asked]


def test_cancelling_in_any_round_gives_everything_back(llama: LoadedModel) -> None:
    for round_ in range(0, 60, 9):
        area = HostArea.open(MemoryDisk(), 1 << 24)
        server = Server(Engine(llama, pages=4 * 20, page_size=8), HOSTED, Ticks(), retention=ValueDensity(), area=area)
        for i, prompt in enumerate(prompts(4, 10)):
            server.submit(Spec(f"r{i}", len(prompt), 60), prompt)
        for _ in range(round_):
            server.step()
        for id in list(server.requests):
            server.cancel(id)
            server.store.check()
        assert server.store.available() == server.store.total
        assert area.used == 0
        assert all(r.state is State.CANCELLED for r in server.requests.values())


def test_a_failing_forward_pass_fails_its_rows_and_leaks_nothing(
    llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(Engine(llama, pages=400, page_size=8), CONFIG, Ticks(), retention=ValueDensity())
    prompt = prompts(1)[0]
    server.submit(Spec("r", len(prompt), 5), prompt)

    def broken(*args: object) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(server.engine, "_forward", broken)
    with pytest.raises(RuntimeError, match="device lost"):
        server.step()
    assert server.requests["r"].state is State.FAILED
    assert server.store.available() == server.store.total
    server.store.check()


def test_stop_ids_end_a_request_and_metrics_see_it(llama: LoadedModel) -> None:
    prompt = prompts(1)[0]
    expected = alone(llama, prompt, 8)
    metrics = ManagerMetrics(1000)
    server = Server(Engine(llama, pages=400, page_size=8), CONFIG, Ticks(), observer=metrics)
    metrics.attach(server.manager, server.store.cache)
    server.submit(Spec("r", len(prompt), 50), prompt, stops=[expected[5]])
    server.run()
    assert server.requests["r"].tokens == expected[: expected.index(expected[5])]
    ended = metrics.registry.get_sample_value(
        "kvgate_requests_ended_total", {"tenant": "default", "priority": "0", "state": "finished"}
    )
    assert ended == 1.0


def test_retiring_a_version_fails_its_requests_and_forgets_its_prefixes(llama: LoadedModel) -> None:
    server = Server(Engine(llama, pages=400, page_size=8), CONFIG, Ticks(), retention=ValueDensity())
    prompt = prompts(1)[0]
    for name, version in (("old", "v1"), ("new", "v2")):
        server.submit(Spec(name, len(prompt), 20, model_version=version), prompt)
    server.step()
    assert server.retire("v1") == ("old",)
    server.store.check()
    assert server.requests["old"].state is State.FAILED
    server.run()
    assert server.requests["new"].tokens == alone(llama, prompt, 20)
    assert server.store.cache is not None
    # The last token is never fed, so its block of the answer is not computed whole.
    assert len(server.store.cache) == (len(prompt) + 19) // 8


def test_recovery_rates_are_measured_and_leave_no_page_behind(llama: LoadedModel) -> None:
    engine = Engine(llama, pages=400, page_size=8)
    found = measured_recovery(engine, HOSTED.recovery, tokens=64)
    assert engine.tables.pool.free == 400
    assert found.host_blocks == HOSTED.recovery.host_blocks
    assert found.bytes_per_block == engine.store.page_bytes * 4
    assert min(found.out_bytes_per_s, found.in_bytes_per_s, found.prefill_tokens_per_s) > 0
    assert found.prefill_quadratic_s >= 0


def test_bad_input_is_named(llama: LoadedModel) -> None:
    engine = Engine(llama, pages=400, page_size=8)
    with pytest.raises(ValueError, match="page_size 16"):
        Server(engine, ManagerConfig(), Ticks())
    server = Server(engine, CONFIG, Ticks())
    with pytest.raises(ValueError, match="prompt_len is 3"):
        server.submit(Spec("r", 3, 5), [1, 2])
    with pytest.raises(ValueError, match="512 positions"):
        server.submit(Spec("r", 2, 511), [1, 2])


def test_orphans_are_found_quarantined_and_returned(llama: LoadedModel) -> None:
    server = Server(Engine(llama, pages=400, page_size=8), CONFIG, Ticks())
    for i, prompt in enumerate(prompts(2)):
        server.submit(Spec(f"r{i}", len(prompt), 60), prompt)
    server.step()
    store = server.store
    lost = store.ledger.alloc(3)
    in_flight = store.launch(0.0, 1e9)
    assert store.audit().orphans.tolist() == lost.tolist()
    store.repair()
    assert store.audit().states["quarantined"] == 3
    store.signal(in_flight)
    assert store.repair().clean
    assert (store.ledger.pool.state[lost] == PageState.FREE).all()
    server.run()
    store.check()
