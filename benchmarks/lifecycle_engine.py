"""The owner's five loads on the real engine (embedded model, fp32): lifecycle policy against none.

"None" is the same server without the policies: first come first served, admitted as soon as the prompt fits, preempted
requests computed again. Every answer is compared with the one its request gets alone. ``--out DIR`` keeps table and
figures.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvgate.cli.replay import DEFAULT_CONFIG
from kvgate.engine.engine import Engine
from kvgate.engine.models import LoadedModel, load_model
from kvgate.engine.serving import Server
from kvgate.lifecycle.config import EstimatorConfig, ManagerConfig, load_config
from kvgate.lifecycle.lab.report import percentile
from kvgate.lifecycle.observer import NullObserver
from kvgate.lifecycle.prefix.value_density import ValueDensity
from kvgate.lifecycle.requests import Requests
from kvgate.lifecycle.states import Spec, State
from kvgate.lifecycle.swap.area import HostArea
from kvgate.lifecycle.swap.disk import MemoryDisk

PAGE = 16


@dataclass(frozen=True)
class Job:
    """A request: when it comes (in rounds), how long prompt and answer are, when its caller gives up."""

    at: int
    prompt: int
    most: int
    tenant: str = "a"
    priority: int = 0
    cancel: int | None = None


LOADS: dict[str, list[Job]] = {
    "short dialogue": [Job(i, 40 + 7 * (i % 4), 16) for i in range(10)],
    "very long prompts": [Job(2 * i, 600 - 30 * i, 8) for i in range(3)] + [Job(1 + 2 * i, 40, 8) for i in range(3)],
    "long generation": [Job(i, 24 + 5 * i, 64) for i in range(4)],
    "cancel storm": [Job(i, 50 + 9 * (i % 3), 16, cancel=(i + 4 + i % 5) if i % 5 < 3 else None) for i in range(10)],
    "mixed priorities": [Job(0, 60 + 10 * i, 40, "batch", 5) for i in range(3)]
    + [Job(8 + 5 * i, 50, 12, "chat", 0) for i in range(5)],
}


@dataclass
class Seen(NullObserver):
    """Rounds and times of every token; tokens computed again."""

    round: int = 0
    first: dict[str, tuple[int, float]] = field(default_factory=dict)
    last: dict[str, tuple[int, float]] = field(default_factory=dict)
    gaps: list[tuple[int, float]] = field(default_factory=list)
    ways: Counter[str] = field(default_factory=Counter)
    again: int = 0
    made: int = 0

    def computed(
        self, slots: NDArray[np.int64], requests: Requests, tokens: NDArray[np.int32], again: NDArray[np.int32]
    ) -> None:
        """Count."""
        self.made += int(tokens.sum())
        self.again += int(again.sum())

    def sampled(self, slots: NDArray[np.int64], requests: Requests) -> None:
        """Note when."""
        now = (self.round, time.perf_counter())
        for slot in slots.tolist():
            id = requests.spec(slot).id
            if id in self.last:
                self.gaps.append((now[0] - self.last[id][0], now[1] - self.last[id][1]))
            self.first.setdefault(id, now)
            self.last[id] = now

    def preempted(self, spec: Spec, way: str, blocks: int) -> None:
        """Count by way."""
        self.ways[way] += 1


def prompts(model: LoadedModel, jobs: list[Job]) -> list[list[int]]:
    """Token ids of the wanted lengths: chat turns about different numbers, cut in ids."""
    found = []
    for i, job in enumerate(jobs):
        text = " ".join(f"Tell me what is known about the number {17 * i + k} and why it matters." for k in range(60))
        ids = model.tokenizer(text, add_special_tokens=False)["input_ids"]
        found.append([int(t) for t in ids[: job.prompt]])
    return found


def alone(model: LoadedModel, prompt: list[int], most: int) -> list[int]:
    """The undisturbed answer."""
    heads = model.info.layers * model.info.kv_heads
    engine = Engine(model, pages=heads * (-(-(len(prompt) + most) // PAGE) + 1), page_size=PAGE)
    row, logits = engine.prefill(prompt)
    found = [int(logits.argmax())]
    while len(found) < most:
        found.append(int(engine.extend([row], [found[-1:]])[0].argmax()))
    return found


def serve(model: LoadedModel, jobs: list[Job], asked: list[list[int]], config: ManagerConfig, *, flat: bool) -> Any:
    """One load through one server; returns the server, what was seen, rounds, seconds, arrivals."""
    need = sum(-(-(len(p) + j.most) // PAGE) for p, j in zip(asked, jobs, strict=True))
    largest = max(-(-(len(p) + j.most) // PAGE) for p, j in zip(asked, jobs, strict=True))
    blocks = max(largest + 2, int(0.45 * need))
    heads = model.info.layers * model.info.kv_heads
    seen = Seen()
    area = None if flat else HostArea.open(MemoryDisk(), 1 << 30)
    server = Server(
        Engine(model, pages=heads * blocks, page_size=PAGE), config, time.perf_counter,
        retention=None if flat else ValueDensity(), area=area, observer=seen,
    )  # fmt: skip
    begun, arrived = time.perf_counter(), {}
    while seen.round < 3000 and (len(arrived) < len(jobs) or server.busy):
        for i, job in enumerate(jobs):
            id = f"r{i}"
            if id not in arrived and job.at <= seen.round:
                server.submit(Spec(id, len(asked[i]), job.most, job.tenant, 0 if flat else job.priority), asked[i])
                arrived[id] = (seen.round, time.perf_counter())
            if job.cancel is not None and job.cancel == seen.round and id in arrived:
                server.cancel(id)
        server.step()
        server.store.check()
        seen.round += 1
    return server, seen, blocks, time.perf_counter() - begun, arrived


def spread(values: list[tuple[int, float]]) -> dict[str, float | None]:
    """P50, P95 and P99 in rounds and milliseconds."""
    found: dict[str, float | None] = {}
    for share in (0.5, 0.95, 0.99):
        name = f"p{round(100 * share)}"
        found[f"{name}_rounds"] = percentile(np.array([v[0] for v in values], float), share)
        ms = percentile(np.array([1000.0 * v[1] for v in values]), share)
        found[f"{name}_ms"] = None if ms is None else round(ms, 1)
    return found


def figures(jobs: list[Job], run: Any, truth: list[list[int]]) -> dict[str, Any]:
    """Everything the table shows; ``differ`` are answers that are not those of their request alone."""
    server, seen, blocks, seconds, arrived = run
    served = [server.requests[f"r{i}"] for i in range(len(jobs))]
    differ = [
        s.spec.id for s, t in zip(served, truth, strict=True) if s.degraded is None and s.tokens != t[: len(s.tokens)]
    ]
    short = [
        s.spec.id for s, j in zip(served, jobs, strict=True) if s.state is State.FINISHED and len(s.tokens) != j.most
    ]
    done = [i for i, s in enumerate(served) if s.state is State.FINISHED]
    waits = {id: (f[0] - arrived[id][0], f[1] - arrived[id][1]) for id, f in seen.first.items()}
    urgent = min(j.priority for j in jobs)
    return {
        "blocks": blocks,
        "rounds": seen.round,
        "seconds": round(seconds, 2),
        "states": dict(Counter(s.state.name.lower() for s in served)),
        "ttft_urgent": spread(
            [waits[f"r{i}"] for i, j in enumerate(jobs) if j.priority == urgent and f"r{i}" in waits]
        ),
        "token_gap": spread(seen.gaps),
        "goodput_tokens_per_s": round(sum(len(served[i].tokens) for i in done) / seconds, 2),
        "goodput_tokens_per_round": round(sum(len(served[i].tokens) for i in done) / max(1, seen.round), 3),
        "preemptions": dict(seen.ways),
        "recomputed_tokens": seen.again,
        "computed_tokens": seen.made,
        "answers_checked": sum(len(s.tokens) > 0 for s in served),
        "answers_that_differ": differ + short,
    }


def row(load: str, policy: str, f: dict[str, Any]) -> str:
    """One line of the table."""
    wait, gap = f["ttft_urgent"], f["token_gap"]
    cells = (
        load, policy, ", ".join(f"{v} {k}" for k, v in sorted(f["states"].items())), f["rounds"],
        f"{wait['p95_rounds']:.0f} / {wait['p99_rounds']:.0f}", f"{wait['p95_ms']:.0f} / {wait['p99_ms']:.0f}",
        f"{gap['p95_rounds']:.0f} / {gap['p99_rounds']:.0f}", f"{gap['p95_ms']:.0f} / {gap['p99_ms']:.0f}",
        f["goodput_tokens_per_round"], f["recomputed_tokens"], sum(f["preemptions"].values()),
        f"{f['answers_checked'] - len(f['answers_that_differ'])} of {f['answers_checked']}",
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


HEAD = (
    "| load | policy | ended | rounds | TTFT P95 / P99, rounds | ms | token gap P95 / P99, rounds | ms "
    "| good tokens a round | computed again | preemptions | answers as alone |\n|" + "---|" * 12
)


def main() -> int:
    """All loads, or those named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("loads", nargs="*", default=list(LOADS))
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    model = load_model("embedded", dtype="float32")
    base = load_config(DEFAULT_CONFIG)
    managed = replace(base, page_size=PAGE, tokens_per_step=256, max_running=16)
    hasty = EstimatorConfig(prior_mean=0.02, prior_weight=1e6)
    none = replace(
        managed,
        estimator=hasty,
        aging_rounds=10**9,
        admission=replace(
            base.admission, reserve=0.0, watermark_per_level=0.0, z_without_host=0.0, resume_rounds=10**9
        ),
        recovery=replace(base.recovery, host_blocks=0),
    )
    lines, found = [HEAD], {}
    for load in args.loads:
        jobs = LOADS[load]
        asked = prompts(model, jobs)
        truth = [alone(model, p, j.most) for p, j in zip(asked, jobs, strict=True)]
        for policy, config in (("managed", managed), ("none", none)):
            f = figures(jobs, serve(model, jobs, asked, config, flat=policy == "none"), truth)
            found[f"{load}: {policy}"] = f
            lines.append(row(load, policy, f))
            print(lines[-1], flush=True)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "engine.md").write_text("\n".join(lines) + "\n")
        (args.out / "engine.json").write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    return 1 if any(f["answers_that_differ"] for f in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
