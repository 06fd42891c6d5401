"""Seeded workloads, so that a replay needs no downloads. The same seed gives the same requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvgate.lifecycle.lab.workloads import Arrival
from kvgate.lifecycle.states import Spec


@dataclass(frozen=True)
class Stream:
    """One tenant's requests: ``count`` of them, one to arrive every ``every`` steps on average from ``start`` on.

    ``prompt`` and ``output`` are inclusive ranges of lengths in tokens; ``slack`` is max_tokens over the output length;
    ``cancels`` the share that is given up on the way.
    """

    tenant: str
    count: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    priority: int = 0
    every: float = 1.0
    start: int = 0
    slack: float = 1.0
    cancels: float = 0.0


WORKLOADS: dict[str, tuple[Stream, ...]] = {
    "small_chat": (Stream("a", 60, (50, 400), (20, 120)), Stream("b", 60, (50, 400), (20, 120))),
    "small_long": (Stream("a", 40, (32, 127), (200, 500), every=0.2, slack=2.5),),
    "small_mixed": (
        Stream("batch", 20, (200, 600), (200, 400), priority=5, every=0.0),
        Stream("chat", 80, (200, 800), (20, 60), every=4.0),
    ),
    "small_noisy": (
        Stream("noisy", 150, (300, 1200), (30, 120), every=0.2),
        Stream("quiet", 10, (100, 300), (20, 50), every=20.0),
    ),
    "small_cancel": (Stream("a", 120, (50, 900), (20, 200), every=0.5, cancels=0.6),),
}


def generate(name: str, seed: int = 0) -> list[Arrival]:
    """Arrivals of a named workload. Raises ValueError for an unknown name."""
    if name not in WORKLOADS:
        raise ValueError(f"workload {name!r} is unknown; choose a file or one of {', '.join(WORKLOADS)}")
    random = np.random.default_rng(seed)
    arrivals = [a for stream in WORKLOADS[name] for a in _requests(stream, random)]
    return sorted(arrivals, key=lambda a: a.at)


def _requests(stream: Stream, random: np.random.Generator) -> list[Arrival]:
    at = stream.start + np.floor(np.cumsum(random.exponential(stream.every, stream.count)))
    prompts = random.integers(stream.prompt[0], stream.prompt[1] + 1, stream.count)
    outputs = random.integers(stream.output[0], stream.output[1] + 1, stream.count)
    given_up = random.random(stream.count) < stream.cancels
    delays = random.integers(0, 60, stream.count)
    most = int(stream.output[1] * stream.slack)
    arrivals = []
    for i in range(stream.count):
        out = int(outputs[i])
        bound = out if stream.slack == 1.0 else most
        spec = Spec(f"{stream.tenant}{i}", int(prompts[i]), bound, stream.tenant, stream.priority)
        arrivals.append(Arrival(spec, float(at[i]), out, float(at[i] + delays[i]) if given_up[i] else None))
    return arrivals
