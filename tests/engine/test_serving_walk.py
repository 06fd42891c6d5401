"""Random operations on the serving loop over a real engine (a tiny model), everything checked after each of them.

Requests come, are cancelled, preempted, swapped, degraded; tenants are invalidated, the disk fails, exports outlive
their requests, pages lose their owner, the process crashes and starts again on the same disk. After every operation
pages, promises, quotas and accounts must agree; every answer that was not degraded must be the undisturbed one.

``python tests/engine/test_serving_walk.py --operations 20000 --out FILE`` runs the long walk and writes its record.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
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
from kvgate.lifecycle.config import EstimatorConfig, ManagerConfig, RecoveryConfig, TenantConfig
from kvgate.lifecycle.prefix.value_density import ValueDensity
from kvgate.lifecycle.states import Spec, State
from kvgate.lifecycle.swap.area import HostArea
from kvgate.lifecycle.swap.disk import MemoryDisk

BLOCKS, LONGEST, QUOTA = 18, 40, 9
CONFIG = ManagerConfig(
    page_size=8,
    tokens_per_step=40,
    max_running=6,
    aging_rounds=6,
    fence_timeout=20.0,
    audit_rounds=64,
    estimator=EstimatorConfig(prior_mean=0.3, prior_weight=1000.0),
    recovery=RecoveryConfig(host_blocks=1000, prefill_tokens_per_s=1.0),
    tenants={
        "default": TenantConfig(),
        "d": TenantConfig(degrade=True),
        "q": TenantConfig(page_quota=QUOTA),
        "c": TenantConfig(max_concurrency=1),
    },
)
TENANTS = ("default", "d", "d", "q", "c")
OFFER = (Offer("sliding_window@16", 16, 300, "m1"), SlidingWindow(window=16))


class ShakyDisk(MemoryDisk):
    """Fails each call with probability ``share``."""

    def __init__(self, random: np.random.Generator) -> None:
        super().__init__()
        self.share = 0.0
        self.failed = 0
        self._random = random

    def _shake(self) -> None:
        if self._random.random() < self.share:
            self.failed += 1
            raise OSError(5, "Input/output error")

    def read(self, name: str) -> bytes:
        self._shake()
        return super().read(name)

    def write(self, name: str, data: bytes) -> None:
        self._shake()
        super().write(name, data)

    def append(self, name: str, data: bytes) -> None:
        self._shake()
        super().append(name, data)

    def rename(self, old: str, new: str) -> None:
        self._shake()
        super().rename(old, new)

    def remove(self, name: str) -> None:
        self._shake()
        super().remove(name)


def tiny(window: int | None = None) -> LoadedModel:
    """A random model of two layers, the first with a native window if one is given."""
    shape = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    }  # fmt: skip
    torch.manual_seed(7)
    if window is None:
        return wrap(LlamaForCausalLM(LlamaConfig(**shape)).float(), None, name="tiny", weights_hash="tiny")
    model = MistralForCausalLM(MistralConfig(**shape, sliding_window=window)).float()
    return wrap(model, None, name="windowed", weights_hash="windowed")


class Walk:
    """One random walk; raises AssertionError at the first thing that does not hold."""

    def __init__(self, model: LoadedModel, seed: int, *, blocks: int = BLOCKS) -> None:
        self.model = model
        self.random = np.random.default_rng(seed)
        self.blocks = blocks
        self.now = 0.0
        self.disk = ShakyDisk(self.random)
        self.counts: Counter[str] = Counter()
        self.serial = 0
        shared = self.random.integers(1, 90, 24).tolist()
        own = [self.random.integers(1, 90, int(n)).tolist() for n in self.random.integers(4, 70, 10)]
        self.prompts = [*own, *(shared + p[:30] for p in own[:5])]
        self.truth: dict[int, list[int]] = {}
        self.start()

    def start(self) -> None:
        """A new process on what the disk holds."""
        calm, self.disk.share = self.disk.share, 0.0
        area = HostArea.open(self.disk, 1 << 18)
        self.server = Server(
            Engine(self.model, pages=4 * self.blocks, page_size=8), CONFIG, lambda: self.now,
            retention=ValueDensity(), area=area, offers=[OFFER],
        )  # fmt: skip
        self.disk.share = calm
        self.counts["discarded"] += len(self.server.discarded)
        self.asked: dict[str, int] = {}
        self.exports: list[int] = []
        assert area.used == 0, "an earlier process's payloads hold room"

    def undisturbed(self, which: int) -> list[int]:
        """The answer a prompt gets alone."""
        if which not in self.truth:
            engine = Engine(self.model, pages=400, page_size=8)
            row, logits = engine.prefill(self.prompts[which])
            found = [int(logits.argmax())]
            while len(found) < LONGEST:
                found.append(int(engine.extend([row], [found[-1:]])[0].argmax()))
            self.truth[which] = found
        return self.truth[which]

    # -- operations ---------------------------------------------------------------------------------------------------

    def submit(self) -> None:
        for _ in range(int(self.random.integers(1, 4))):
            which = int(self.random.integers(len(self.prompts)))
            prompt = self.prompts[which]
            id, self.serial = f"r{self.serial}", self.serial + 1
            deadline = self.now + float(self.random.integers(5, 80)) if self.random.random() < 0.15 else None
            tenant = str(self.random.choice(TENANTS))
            most = int(self.random.integers(1, LONGEST + 1))
            spec = Spec(id, len(prompt), most, tenant, int(self.random.integers(0, 3)), deadline, "m1")
            if self.server.submit(spec, prompt).outcome is not Outcome.REJECT:
                self.asked[id] = which
            else:
                self.counts["rejected"] += 1
                assert id not in self.server.requests

    def step(self) -> None:
        for _ in range(int(self.random.integers(1, 5))):
            self.now += 1.0
            plan = self.server.step()
            for victim in plan.preempted:
                self.counts[victim.way.value] += 1
            self.look()

    def cancel(self) -> None:
        if self.asked:
            id = str(self.random.choice(sorted(self.asked)))
            live = not self.server.requests[id].state.ended
            assert self.server.cancel(id) == live
            assert not self.server.cancel(id)

    def preempt(self) -> None:
        running = self.server.manager.running
        if len(running):
            way = self.server.manager.preempt(int(self.random.choice(running)), "walk").way
            self.counts[way.value] += 1
            self.server.cancel("nobody")

    def invalidate(self) -> None:
        gone = self.server.invalidate(tenant=str(self.random.choice(TENANTS)))
        self.counts["invalidated"] += gone.dropped

    def shake(self) -> None:
        self.disk.share = float(self.random.choice([0.0, 0.0, 0.1, 0.5, 1.0]))

    def export(self) -> None:
        running = self.server.manager.running
        if len(running):
            deadline = self.now + float(self.random.choice([10.0, 1e18]))
            ticket = self.server.store.launch(self.now, deadline)
            slot = int(self.random.choice(running))
            self.server.manager.export(self.server.manager.requests.spec(slot).id, ticket)
            self.exports.append(ticket)

    def signal(self) -> None:
        if self.exports:
            self.server.store.signal(self.exports.pop(int(self.random.integers(len(self.exports)))))

    def lose_pages(self) -> None:
        free = self.server.store.spare_pages()
        if free >= 4:
            self.server.store.ledger.alloc(int(self.random.integers(1, min(free, 12) + 1)))
            found = self.server.audit()
            assert len(found.orphans) > 0
            self.counts["orphans"] += len(found.orphans)

    def crash(self) -> None:
        """The process is gone, in the middle of a round at times; only the disk is left."""
        if self.random.random() < 0.5 and len(self.server.manager.requests):
            self.server.manager.plan()
        self.start()

    OPERATIONS = (
        ("submit", 0.25), ("step", 0.45), ("cancel", 0.06), ("preempt", 0.06), ("invalidate", 0.03), ("shake", 0.04),
        ("export", 0.04), ("signal", 0.04), ("lose_pages", 0.02), ("crash", 0.01),
    )  # fmt: skip

    def run(self, operations: int) -> None:
        """So many operations, then everybody leaves and not one page is missing."""
        names = [name for name, _ in self.OPERATIONS]
        weights = [share for _, share in self.OPERATIONS]
        for _ in range(operations):
            name = str(self.random.choice(names, p=weights))
            getattr(self, name)()
            self.counts[name] += 1
            self.look()
        self.drain()

    def drain(self) -> None:
        """Every export signals, every request ends, everything is free."""
        for ticket in self.exports:
            self.server.store.signal(ticket)
        self.exports.clear()
        for _ in range(5000):
            if not self.server.busy:
                break
            self.now += 1.0
            self.server.step()
            self.look()
        assert not self.server.busy, f"{len(self.server.manager.requests)} requests never end"
        self.server.audit()
        self.server.audit()
        store = self.server.store
        assert store.available() == store.total
        assert store.area is not None
        assert store.area.used == 0
        if store.cache is not None:
            store.cache.evict(10**6)
        assert store.ledger.pool.free == store.ledger.pool.total

    # -- what must hold -----------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Pages, promises, quotas, accounts and answers."""
        server, manager = self.server, self.server.manager
        server.store.check()
        requests, tenants = manager.requests, manager.tenants
        held: Counter[int] = Counter()
        running: Counter[int] = Counter()
        for slot in manager.running.tolist():
            held[int(requests.account[slot])] += int(requests.blocks[slot])
            running[int(requests.account[slot])] += 1
            row = server.store.rows[slot]
            pages = int(server.engine.tables.counts[row.id].sum())
            assert pages <= 4 * int(requests.blocks[slot]), "a row holds more than it was given"
        for account, name in enumerate(tenants.names):
            assert tenants.blocks[account] == held[account]
            assert tenants.running[account] == running[account]
            quota, most = CONFIG.tenants[name].page_quota, CONFIG.tenants[name].max_concurrency
            assert quota is None or held[account] <= quota, "a tenant holds more than its quota"
            assert most is None or running[account] <= most
        assert len(server.store.rows) == len(manager.running)
        for id in list(self.asked):
            served = server.requests[id]
            if not served.state.ended:
                continue
            assert served.state is not State.FAILED, served.error
            self.counts[served.state.name.lower()] += 1
            if served.degraded is None:
                assert served.tokens == self.undisturbed(self.asked[id])[: len(served.tokens)], "another answer"
                self.counts["answers compared"] += 1
            else:
                assert served.spec.tenant == "d", "degraded without its consent"
                self.counts["degraded"] += 1
            if served.state is State.FINISHED:
                assert len(served.tokens) == served.spec.max_tokens
            server.forget(id)
            del self.asked[id]


@pytest.mark.parametrize("seed", [1, 2])
def test_a_few_hundred_operations(seed: int) -> None:
    walk = Walk(tiny(), seed)
    walk.run(120)
    assert walk.counts["answers compared"] > 8


def test_a_walk_with_native_windows() -> None:
    walk = Walk(tiny(24), 3, blocks=12)
    walk.run(80)
    assert walk.counts["answers compared"] > 4


@pytest.mark.slow
def test_a_few_thousand_operations_meet_every_event() -> None:
    total: Counter[str] = Counter()
    for seed in range(4):
        walk = Walk(tiny(), 10 + seed)
        walk.run(500)
        total += walk.counts
        total["disk failures"] += walk.disk.failed
    for event in ("swap", "recompute", "degraded", "cancelled", "timed_out", "orphans", "invalidated", "discarded",
                  "disk failures", "crash"):  # fmt: skip
        assert total[event] > 0, f"{event} never happened"


def main() -> int:
    """The long walk, in parts of a thousand operations with a seed each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=20_000)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, windowed = tiny(), tiny(24)
    total: Counter[str] = Counter()
    begun, done, part = time.perf_counter(), 0, min(1000, args.operations)
    while done < args.operations:
        seed = done // part
        walk = Walk(windowed, seed, blocks=12) if seed % 5 == 4 else Walk(model, seed)
        walk.run(part)
        done += part
        total += walk.counts
        total["disk failures"] += walk.disk.failed
        print(done, dict(total), f"{time.perf_counter() - begun:.0f} s", flush=True)
        record = {
            "operations": done,
            "violations": 0,
            "seconds": round(time.perf_counter() - begun, 1),
            "events": dict(sorted(total.items())),
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
