"""A small finished run made by hand, for tests of tables and reports. Some of its answers and names are hostile."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvgate.evals.leaderboard.finished import FinishedRun
from kvgate.evals.log.records import CellRecord, TurnRecord

HOSTILE = " <script>alert(1)</script>\x1b[31m\u202e $x_1$ & \"'>\n</pre>"
EVIL = "mine<img src=x onerror=alert(1)>$a_b$"
DEPTHS = (0.1, 0.5, 0.9)
ROWS = (  # label, policy, params, ratio, which depths survive
    ("streaming_llm(positions=rebased)@0.5", "streaming_llm", {"positions": "rebased"}, 0.5, (0.5, 0.9)),
    ("streaming_llm(positions=rebased)@0.25", "streaming_llm", {"positions": "rebased"}, 0.25, (0.9,)),
    (f"{EVIL}@0.5", EVIL, {}, 0.5, DEPTHS),
)


def digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def run_of(records: tuple[CellRecord, ...], model: str = "./nowhere") -> FinishedRun:
    """A finished run around ``records``."""
    plan: dict[str, Any] = {
        "name": "sample <b>", "model": model, "gate": "screen",
        "suites": [{"name": "retrieval", "counts": {"512": 1}}], "policies": [{"policy": "h2o", "budgets": [0.5]}],
    }  # fmt: skip
    provenance = {
        "kvgate": "0", "code_hash": "0" * 32, "git": {"revision": "0" * 40, "dirty": True},
        "python": "3", "packages": {},
        "machine": {"cpu": "<i>any</i>"},
        "model": {"name": model, "revision": "local", "weights_hash": "0" * 32, "dtype": "float32"},
    }  # fmt: skip
    columns = [{"label": label, "oracle": False} for label in dict.fromkeys(record.label for record in records)]
    manifest = {"plan": plan, "config_hash": "c" * 32, "provenance": provenance, "columns": columns}
    none = {"cells": 4, "different": 0}
    checks = {"schema_version": 2, "units": [0], "repeat": {"full": none}, "batch_invariance": none}
    return FinishedRun(Path(), manifest, records, checks)


def records(items: int = 4) -> tuple[CellRecord, ...]:
    """Two suites under two protocols, two lengths, three depths, ``items`` items in each of those."""
    return tuple(_records(items))


def _records(items: int) -> Iterator[CellRecord]:
    for suite, protocol, turns in (
        ("retrieval", "question_unseen", ("q",)),
        ("multi_turn", "multi_turn", ("q1", "q2")),
    ):
        for length in (512, 1024):
            for number in range(items * len(DEPTHS)):
                depth = DEPTHS[number % len(DEPTHS)]
                yield _cell(suite, protocol, turns, length, number, depth, "full", "full", {}, None, True)
                for label, policy, params, ratio, kept in ROWS:
                    alive = depth in kept
                    yield _cell(suite, protocol, turns, length, number, depth, label, policy, params, ratio, alive)


def _cell(
    suite: str, protocol: str, turns: tuple[str, ...], length: int, number: int, depth: float, label: str, policy: str,
    params: dict[str, Any], ratio: float | None, alive: bool,
) -> CellRecord:  # fmt: skip
    answers = tuple(
        TurnRecord(
            turn, 1.0 if alive or turn == "q2" else 0.0, (1,), " 42" if alive or turn == "q2" else HOSTILE, False
        )
        for turn in turns
    )
    exact = length * 1000
    held = exact if ratio is None else int(exact * ratio)
    item = digest(suite, length, number)
    return CellRecord(
        cell_id=digest(item, label), config_hash="c" * 32, suite=suite, task="single", index=number, length=length,
        depth=depth, cluster=f"{length}-{number}", item_hash=item, context_hash=digest("c", item), protocol=protocol,
        policy=policy, label=label, params=params, budget=None if ratio is None else int(length * ratio), ratio=ratio,
        score=sum(turn.score or 0.0 for turn in answers) / len(answers), turns=answers,
        evicted_tokens=0.0 if ratio is None else length * (1 - ratio), native=False, covered=False, floored=False,
        resident_bytes=held, logical_bytes=held, exact_resident_bytes=exact, context_tokens=length,
        output_tokens=len(answers), nan=False, facts_kept=((100, 100),) if alive else ((0, 50),),
    )  # fmt: skip
