"""Faults where the parts of the serving loop meet, each on the real engine: a full disk, a lost page, a late cancel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from kvgate.compressors.sliding_window import SlidingWindow
from kvgate.engine.engine import Engine
from kvgate.engine.models import LoadedModel, wrap
from kvgate.engine.serving import Server
from kvgate.lifecycle.admission import Offer, Outcome
from kvgate.lifecycle.config import AdmissionConfig, EstimatorConfig, ManagerConfig, RecoveryConfig, TenantConfig
from kvgate.lifecycle.manager import OutOfTurnError
from kvgate.lifecycle.prefix.policies import TimeToLive
from kvgate.lifecycle.prefix.value_density import ValueDensity
from kvgate.lifecycle.states import Spec, State
from kvgate.lifecycle.swap.area import HostArea
from kvgate.lifecycle.swap.disk import Disk, MemoryDisk, OsDisk

SHAPE = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
CONFIG = ManagerConfig(
    page_size=8,
    tokens_per_step=64,
    max_running=8,
    admission=AdmissionConfig(z_without_host=0.0),
    estimator=EstimatorConfig(prior_mean=0.05, prior_weight=1000.0),
)
HOSTED = replace(CONFIG, recovery=RecoveryConfig(host_blocks=1000, prefill_tokens_per_s=1.0))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    torch.manual_seed(5)
    return wrap(LlamaForCausalLM(LlamaConfig(**SHAPE)).float(), None, name="tiny", weights_hash="tiny")


@pytest.fixture(scope="module")
def windowed() -> LoadedModel:
    torch.manual_seed(6)
    model = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=24)).float()
    return wrap(model, None, name="windowed", weights_hash="windowed")


def prompts(count: int, length: int = 40, seed: int = 3) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(1, 200, length + 3 * i).tolist() for i in range(count)]


def alone(model: LoadedModel, prompt: list[int], tokens: int) -> list[int]:
    engine = Engine(model, pages=400, page_size=8)
    row, logits = engine.prefill(prompt)
    found = [int(logits.argmax())]
    while len(found) < tokens:
        found.append(int(engine.extend([row], [found[-1:]])[0].argmax()))
    return found


def drain(server: Server, most: int = 2000) -> None:
    for _ in range(most):
        if not len(server.manager.requests):
            return
        server.step()
        server.store.check()
    raise AssertionError(f"{len(server.manager.requests)} requests are left")


def crowded(model: LoadedModel, disk: Disk) -> tuple[Server, list[list[int]]]:
    """Four requests of 60 tokens in a pool of 20 blocks: some have to be swapped."""
    server = Server(Engine(model, pages=80, page_size=8), HOSTED, Clock(), area=HostArea.open(disk, 1 << 24))
    asked = prompts(4, 10)
    for i, prompt in enumerate(asked):
        server.submit(Spec(f"r{i}", len(prompt), 60), prompt)
    return server, asked


# -- degrading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_degraded_rows_keep_their_promises_beside_a_prefix_cache(llama: LoadedModel, seed: int) -> None:
    policy, offer = SlidingWindow(window=32), Offer("sliding_window@32", 32, 300, "m1")
    random = np.random.default_rng(seed)
    blocks = int(random.integers(16, 40))
    tenants = {"d": TenantConfig(degrade=True), "default": TenantConfig()}
    estimator = EstimatorConfig(prior_mean=float(random.choice([0.3, 0.9])), prior_weight=1000.0)
    config = replace(CONFIG, estimator=estimator, tenants=tenants)
    engine = Engine(llama, pages=4 * blocks, page_size=8)
    server = Server(engine, config, Clock(), offers=[(offer, policy)], retention=ValueDensity())
    shared = prompts(1, 24, seed=seed)[0]
    for i, prompt in enumerate(prompts(7, int(random.integers(20, 60)), seed=seed + 1)):
        asked = (shared + prompt)[: len(prompt)] if i % 2 else prompt
        most = int(random.integers(20, 90))
        tenant = "d" if random.random() < 0.6 else "default"
        server.submit(Spec(f"r{i}", len(asked), most, tenant, model_version="m1"), asked)
    drain(server)
    ended = [s for s in server.requests.values() if s.state is not State.REJECTED]
    assert all(s.state is State.FINISHED for s in ended)
    for served in ended:
        if served.degraded is None:
            assert served.tokens == alone(llama, list(served.prompt), len(served.tokens))
        else:
            assert served.spec.tenant == "d"
    assert server.store.available() == server.store.total


def test_only_tenants_that_accept_it_are_degraded_and_only_then_something_is(llama: LoadedModel) -> None:
    def degraded(accepts: bool) -> int:
        policy, offer = SlidingWindow(window=32), Offer("sliding_window@32", 32, 300, "m1")
        tenants = {"d": TenantConfig(degrade=accepts), "default": TenantConfig()}
        config = replace(CONFIG, tenants=tenants, estimator=EstimatorConfig(prior_mean=0.9, prior_weight=1000.0))
        server = Server(
            Engine(llama, pages=4 * 27, page_size=8),
            config,
            Clock(),
            offers=[(offer, policy)],
            retention=ValueDensity(),
        )
        for i, prompt in enumerate(prompts(7, 50, seed=2)):
            server.submit(Spec(f"r{i}", len(prompt), 60, "d", model_version="m1"), prompt)
        drain(server)
        return sum(s.degraded is not None for s in server.requests.values())

    assert degraded(accepts=True) > 0
    assert degraded(accepts=False) == 0


def test_swapped_and_recomputed_degraded_rows_fit_what_was_promised(llama: LoadedModel) -> None:
    for config, area in ((HOSTED, HostArea.open(MemoryDisk(), 1 << 24)), (CONFIG, None)):
        policy, offer = SlidingWindow(window=16), Offer("sliding_window@16", 16, 300, "m1")
        tenants = {"d": TenantConfig(degrade=True), "default": TenantConfig()}
        busy = replace(config, tenants=tenants, estimator=EstimatorConfig(prior_mean=0.9, prior_weight=1000.0))
        engine = Engine(llama, pages=4 * 24, page_size=8)
        server = Server(engine, busy, Clock(), offers=[(offer, policy)], area=area)
        for i, prompt in enumerate(prompts(6, 40)):
            tenant = "d" if i % 2 else "default"
            server.submit(Spec(f"r{i}", len(prompt), 80, tenant, model_version="m1"), prompt)
        forced = 0
        for _ in range(1000):
            if not len(server.manager.requests):
                break
            server.step()
            caps = server.manager.requests.cap
            victims = [int(s) for s in server.manager.running if caps[s] and server.store.rows[int(s)].policy]
            if victims and forced < 6:
                server.manager.preempt(victims[0], "test")
                forced += 1
            server.store.check()
        assert forced == 6
        assert all(s.state is State.FINISHED for s in server.requests.values())
        assert server.store.available() == server.store.total


# -- the host disk ----------------------------------------------------------------------------------------------------


class Failing(MemoryDisk):
    """A disk of which one call fails, chosen by ``breaks(operation, name, data)``."""

    def __init__(self, breaks: Callable[[str, str, bytes], bool], times: int = 1) -> None:
        super().__init__()
        self._breaks = breaks
        self.left = times

    def _maybe(self, operation: str, name: str, data: bytes = b"") -> None:
        if self.left and self._breaks(operation, name, data):
            self.left -= 1
            raise OSError(28, "No space left on device")

    def read(self, name: str) -> bytes:
        self._maybe("read", name)
        return super().read(name)

    def write(self, name: str, data: bytes) -> None:
        self._maybe("write", name)
        super().write(name, data)

    def append(self, name: str, data: bytes) -> None:
        self._maybe("append", name, data)
        super().append(name, data)

    def rename(self, old: str, new: str) -> None:
        self._maybe("rename", new)
        super().rename(old, new)

    def remove(self, name: str) -> None:
        self._maybe("remove", name)
        super().remove(name)


BREAKS: dict[str, Callable[[str, str, bytes], bool]] = {
    "full on write": lambda op, name, data: op == "write" and name.endswith(".tmp"),
    "rename": lambda op, name, data: op == "rename" and name.endswith(".kv"),
    "journal put": lambda op, name, data: op == "append" and b'"put"' in data,
    "read": lambda op, name, data: op == "read" and name.endswith(".kv"),
    "journal tombstone": lambda op, name, data: op == "append" and b'"del"' in data,
    "remove": lambda op, name, data: op == "remove" and name.endswith(".kv"),
}


@pytest.mark.parametrize("times", [1, 1000])
@pytest.mark.parametrize("where", BREAKS)
def test_a_failing_host_disk_costs_work_and_nothing_else(llama: LoadedModel, where: str, times: int) -> None:
    disk = Failing(BREAKS[where], times)
    server, asked = crowded(llama, disk)
    drain(server)
    assert disk.left < times, "the disk never failed"
    assert [s.tokens for s in server.requests.values()] == [alone(llama, p, 60) for p in asked]
    area = server.store.area
    assert area is not None
    assert area.used == 0
    assert area.counts.failed > 0
    assert server.engine.tables.pool.free == 80


def test_what_a_crashed_process_had_swapped_is_discarded_by_name(llama: LoadedModel, tmp_path: Path) -> None:
    server, asked = crowded(llama, OsDisk(tmp_path))
    area = server.store.area
    assert area is not None
    while not area.names():
        server.step()
    left = tuple(area.names())
    # The process ends here. The next one serves the same ids again.
    again, _ = crowded(llama, OsDisk(tmp_path))
    assert again.discarded == left
    drain(again)
    assert [s.tokens for s in again.requests.values()] == [alone(llama, p, 60) for p in asked]
    assert again.store.area is not None
    assert again.store.area.used == 0
    assert HostArea.open(OsDisk(tmp_path), 1 << 24).names() == []


@pytest.mark.parametrize("where", ["write", "rename", "append"])
def test_a_cancel_from_inside_a_swap_is_refused_by_name(llama: LoadedModel, where: str) -> None:
    refused: list[str] = []

    def cancel(operation: str, name: str, data: bytes) -> bool:
        if operation == where and not refused:
            with pytest.raises(OutOfTurnError, match="end of r3: a round is being planned") as caught:
                server.cancel("r3")
            refused.append(str(caught.value))
        return False

    server, asked = crowded(llama, Failing(cancel))
    drain(server)
    assert refused
    assert [s.tokens for s in server.requests.values()] == [alone(llama, p, 60) for p in asked]


# -- exports, audits, windows -----------------------------------------------------------------------------------------


def test_cached_blocks_under_an_export_are_not_counted_on(llama: LoadedModel) -> None:
    server = Server(Engine(llama, pages=80, page_size=8), CONFIG, Clock(), retention=ValueDensity())
    first, second = prompts(1, 100)[0], prompts(1, 120, seed=9)[0]
    server.submit(Spec("a", len(first), 3), first)
    while server.requests["a"].state is not State.DECODE:
        server.step()
    copy = server.store.launch(0.0, 1e9)
    server.manager.export("a", copy)
    drain(server)
    assert server.store.available() == 20 - 13
    server.submit(Spec("b", len(second), 3), second)
    for _ in range(3):
        server.step()
        server.store.check()
    assert server.requests["b"].state is State.QUEUED
    server.store.signal(copy)
    drain(server)
    assert server.requests["b"].tokens == alone(llama, second, 3)


def test_a_lone_request_whose_pages_lost_their_owner_starts_after_an_audit(llama: LoadedModel) -> None:
    server = Server(Engine(llama, pages=80, page_size=8), CONFIG, Clock())
    server.store.ledger.alloc(60)
    prompt = prompts(1, 100)[0]
    server.submit(Spec("a", len(prompt), 3), prompt)
    drain(server, 10)
    assert server.requests["a"].tokens == alone(llama, prompt, 3)
    assert server.engine.tables.pool.free == 80


def test_audits_run_on_a_schedule(llama: LoadedModel) -> None:
    server = Server(Engine(llama, pages=400, page_size=8), replace(CONFIG, audit_rounds=5), Clock())
    server.store.ledger.alloc(3)
    prompt = prompts(1)[0]
    server.submit(Spec("a", len(prompt), 20), prompt)
    server.run()
    assert server.engine.tables.pool.free == 400


def test_entries_that_have_lived_their_time_go_without_a_look_up(llama: LoadedModel) -> None:
    clock = Clock()
    server = Server(Engine(llama, pages=400, page_size=8), CONFIG, clock, retention=TimeToLive(10.0))
    prompt = prompts(1)[0]
    server.submit(Spec("a", len(prompt), 4), prompt)
    server.run()
    assert server.store.cache is not None
    assert len(server.store.cache) > 0
    clock.now += 11.0
    server.step()
    assert len(server.store.cache) == 0
    assert server.engine.tables.pool.free == 400


def test_windowed_rows_are_admitted_for_what_they_hold(windowed: LoadedModel) -> None:
    config = replace(CONFIG, estimator=EstimatorConfig(prior_mean=0.9, prior_weight=1000.0))
    server = Server(Engine(windowed, pages=4 * 60, page_size=8), config, Clock(), retention=ValueDensity())
    asked = prompts(8, 100)
    for i, prompt in enumerate(asked):
        assert server.submit(Spec(f"r{i}", len(prompt), 100), prompt).outcome is Outcome.QUEUE
    most = 0
    for _ in range(400):
        server.step()
        server.store.check()
        most = max(most, len(server.manager.running))
    assert most == 8, "eight rows of at most 7 blocks fit into 60"
    for served, prompt in zip(server.requests.values(), asked, strict=True):
        assert served.tokens == alone(windowed, prompt, 100)
    reason = server.store.no_cache_because
    assert reason is not None
    assert "native windows" in reason
    assert server.store.cache is None


def test_a_windowed_request_longer_than_the_pool_runs_in_it(windowed: LoadedModel) -> None:
    server = Server(Engine(windowed, pages=4 * 8, page_size=8), CONFIG, Clock())
    prompt = prompts(1, 100)[0]
    assert server.submit(Spec("a", 100, 60), prompt).outcome is Outcome.QUEUE
    drain(server)
    assert server.requests["a"].tokens == alone(windowed, prompt, 60)


# -- invalidation, forgetting, pages that are not there ---------------------------------------------------------------


def test_an_invalidated_tenant_has_no_hits_and_running_prompts_do_not_enter(llama: LoadedModel) -> None:
    server = Server(Engine(llama, pages=800, page_size=8), CONFIG, Clock(), retention=ValueDensity())
    prompt, other = prompts(1, 100)[0], prompts(1, 100, seed=8)[0]
    for name, tenant, asked in (("a1", "a", prompt), ("b1", "b", other)):
        server.submit(Spec(name, 100, 3, tenant), asked)
        server.run()
    longer = [*prompt, *prompts(1, 90, seed=4)[0]]
    server.submit(Spec("a2", 190, 3, "a"), longer)
    server.step()  # its first chunk: it holds cached blocks and computes the rest
    gone = server.invalidate(tenant="a")
    assert gone.dropped == 12
    assert gone.in_use == 12 * 4
    server.run()
    server.store.check()
    for name, tenant, asked, hit in (("a3", "a", longer, 0), ("b2", "b", other, 96)):
        server.submit(Spec(name, len(asked), 3, tenant), asked)
        server.run()
        assert server.requests[name].hit == hit
        assert server.requests[name].tokens == alone(llama, asked, 3)


def test_ended_requests_can_be_forgotten_and_live_ones_not(llama: LoadedModel) -> None:
    server = Server(Engine(llama, pages=400, page_size=8), CONFIG, Clock())
    prompt = prompts(1)[0]
    server.submit(Spec("a", len(prompt), 3), prompt)
    with pytest.raises(ValueError, match="request a: it is QUEUED"):
        server.forget("a")
    server.run()
    assert server.forget("a").tokens == alone(llama, prompt, 3)
    assert server.requests == {}
    with pytest.raises(ValueError, match="it is unknown"):
        server.forget("a")


def test_a_row_whose_planned_pages_are_gone_gives_way_instead_of_failing(llama: LoadedModel) -> None:
    server = Server(Engine(llama, pages=4 * 30, page_size=8), CONFIG, Clock())
    asked = prompts(3)
    for i, prompt in enumerate(asked):
        server.submit(Spec(f"r{i}", len(prompt), 40), prompt)
    for _ in range(3):
        server.step()
    pool = server.engine.tables.pool
    stolen = server.store.ledger.alloc(pool.free)  # somebody takes pages past all promises
    for _ in range(10):
        server.step()
    server.store.ledger.release(stolen)
    drain(server)
    assert [s.tokens for s in server.requests.values()] == [alone(llama, p, 40) for p in asked]


def test_own_work_found_again_is_no_prefix_hit(llama: LoadedModel) -> None:
    server = Server(Engine(llama, pages=400, page_size=8), CONFIG, Clock(), retention=ValueDensity())
    prompt = prompts(1, 60)[0]
    server.submit(Spec("a", 60, 20), prompt)
    for _ in range(4):
        server.step()
    server.manager.preempt(server.manager.requests.index["a"], "test")
    server.run()
    served = server.requests["a"]
    assert served.tokens == alone(llama, prompt, 20)
    assert served.hit == 0
    assert served.rehit == 56
    assert server.store.cache is not None
    assert server.store.cache.counts.hit == 0
    assert server.store.cache.counts.found_again == 7
