"""What a sceptic tried on the gate, simulated with the rules of before and of now.

    python benchmarks/gate_cases.py --before PATH [--replicates 1000] [--out results/prove]

PATH is a checkout of commit dc82097 (`git worktree add --detach PATH dc82097`), whose own verdict code judges the same
simulated pairs. Each case says which outcome is wrong; the table has the share of simulated runs with that outcome.
Scores are right or wrong, one suite, the gate `production` as each commit ships it. Writes cases.json and cases.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

SEED = 20261203
SIDES = ("before", "now")
LOOK = 100  # items between two looks


@dataclass
class Made:
    """A simulated run: where its items stand and what both sides score, ``[items]``; ``rows`` of policies."""

    exact: np.ndarray
    rows: list[np.ndarray]
    task: list[str]
    length: list[int]
    depth: list[float | None]
    cluster: list[str] = field(default_factory=list)
    looks: bool = False
    shuffled: bool = False
    refused: bool = False
    budgets: tuple[int, ...] = (128,)
    one_policy: bool = False
    resident: float | None = None  # share of the exact run's bytes; None: as the budget says


def flat(n: int, rng: np.random.Generator, right: float = 0.9) -> Made:
    exact = (rng.random(n) < right).astype(float)
    return Made(exact, [exact.copy()], ["t"] * n, [1024] * n, [None] * n, [f"c{i}" for i in range(n)])


def lose(policy: np.ndarray, where: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """``share`` of the right answers at ``where`` become wrong."""
    return np.where(where & (rng.random(policy.size) < share), 0.0, policy)


def pooled_task(rng: np.random.Generator, now: bool) -> Made:
    made = flat(1400, rng)
    made.task = [f"task{i % 14}" for i in range(1400)]
    hit = np.arange(1400) % 14 == 3
    made.rows = [lose(made.exact, hit, 0.16 / 0.9, rng)]
    return made


def incompetent(right: float) -> Callable[[np.random.Generator, bool], Made]:
    def case(rng: np.random.Generator, now: bool) -> Made:
        made = flat(1260, rng, 0.95)
        place = np.arange(1260) % 9
        made.length, made.depth = [(512, 1024, 2048)[p % 3] for p in place], [(0.1, 0.5, 0.9)[p // 3] for p in place]
        bad = place == 5
        made.exact = np.where(bad, (rng.random(1260) < right).astype(float), made.exact)
        made.rows = [lose(made.exact, bad, 0.9, rng)]
        return made

    return case


def late_loss(rng: np.random.Generator, now: bool) -> Made:
    made = flat(1400, rng)
    made.rows = [lose(made.exact, np.arange(1400) >= 600, 1.0, rng)]
    made.looks, made.shuffled = True, now
    return made


def run_effect(seeds: int) -> Callable[[np.random.Generator, bool], Made]:
    def case(rng: np.random.Generator, now: bool) -> Made:
        made = flat(1600, rng, 1.0)
        effect = rng.integers(0, 2, seeds if now else 1) * 0.06
        made.rows = [lose(made.exact, rng.random(1600) < effect[np.arange(1600) % effect.size], 1.0, rng)]
        return made

    return case


def clusters_of_five(declared: bool) -> Callable[[np.random.Generator, bool], Made]:
    def case(rng: np.random.Generator, now: bool) -> Made:
        made = flat(1400, rng, 1.0)
        lost = np.repeat(rng.random(280) < 0.03, 5)
        made.rows = [np.where(lost, 0.0, 1.0)]
        if now and declared:
            made.cluster = [f"c{i // 5}" for i in range(1400)]
        made.refused = now and not declared
        return made

    return case


def family_escape(rng: np.random.Generator, now: bool) -> Made:
    made = flat(400, rng, 1.0)
    made.rows = [lose(made.exact, made.exact > 0, 0.03, rng), made.exact.copy()]
    made.budgets, made.one_policy = (256, 128), True
    return made


def lying_budget(rng: np.random.Generator, now: bool) -> Made:
    made = flat(300, rng)
    made.resident = 1.0
    return made


def best_of_six(rng: np.random.Generator, now: bool) -> Made:
    made = flat(600, rng, 1.0)
    made.rows = [lose(made.exact, made.exact > 0, 0.03, rng) for _ in range(6)]
    made.budgets = (128,) * 6
    return made


CASES: dict[str, tuple[str, Callable[[np.random.Generator, bool], Made]]] = {
    "pooled task": ("enabled although 1 of 14 tasks lost .16", pooled_task),
    "incompetent slice at .55": ("enabled although 90 % is lost in 1 of 9 slices, exact .55 there", incompetent(0.55)),
    "incompetent slice at .62": ("enabled although 90 % is lost in 1 of 9 slices, exact .62 there", incompetent(0.62)),
    "late loss": ("enabled at some look although all is lost after item 600 of the source's order", late_loss),
    "random effect of a run": ("enabled, a loss of 0 or .06 common to the run, .03 on average", run_effect(1)),
    "random effect, 8 seeds now": ("the same; now one run over 8 seeds, each with its own effect", run_effect(8)),
    "clusters of five, undeclared": ("enabled at a loss of .03, five items a context", clusters_of_five(False)),
    "clusters of five, declared now": ("the same; now declared", clusters_of_five(True)),
    "family escape": ("smaller integer budget enabled, the larger not", family_escape),
    "lying budget": ("enabled at 12.5 % with all bytes resident", lying_budget),
    "selection": ("any of 6 policies enabled, each loses .03", best_of_six),
}


# -- judging, by whichever kvgate is on the path ---------------------------------------------------------------------


def judged(name: str, replicates: int, now: bool) -> float:
    """Share of runs with the wrong outcome."""
    judge, wrong = (Now if now else Before)(), 0
    for replicate in range(replicates):
        rng = np.random.default_rng([SEED, list(CASES).index(name), replicate])
        made = CASES[name][1](rng, now)
        if made.refused and refused():
            continue
        for subset in subsets(made, rng):
            enabled = judge.enabled(made, subset)
            if enabled and not (made.one_policy and 0 in enabled):
                wrong += 1
                break
    return wrong / replicates


def subsets(made: Made, rng: np.random.Generator) -> Iterator[np.ndarray]:
    order = rng.permutation(made.exact.size) if made.shuffled else np.arange(made.exact.size)
    for end in range(LOOK, order.size + 1, LOOK) if made.looks else [order.size]:
        yield order[:end]


class Now:
    """The rules of this tree: rows share alpha by family, go from large to small, and must free their memory."""

    def __init__(self) -> None:
        self._tables: dict[Any, Any] = {}

    def enabled(self, made: Made, subset: np.ndarray) -> set[int]:
        from kvgate.evals.judge.columns import Pair, columns_of
        from kvgate.evals.judge.gates import load_gate
        from kvgate.evals.judge.memory import held_too_much
        from kvgate.evals.judge.rules import judge_row
        from kvgate.evals.judge.types import Levels

        gate = load_gate("production")
        families = 1 if made.one_policy else len(made.rows)
        levels = Levels(gate.alpha / families, gate.alpha, made.looks, limits=False)
        place = sorted(subset)  # columns are in order of the items' names
        key = (tuple(made.task), tuple(made.length), tuple(made.cluster), tuple(place))
        if key not in self._tables:  # where items stand is the same in every replicate of a case
            self._tables = {key: columns_of(
                Pair("s", made.task[i], f"{i:06d}", made.cluster[i], 1.0, 1.0, made.length[i],
                     gate.depth_bin(made.depth[i]), 1, 1, made.length[i]) for i in place
            )}  # fmt: skip
        (table,) = self._tables[key]
        found: set[int] = set()
        for number, (scores, budget) in enumerate(zip(made.rows, made.budgets, strict=True)):
            status, _, _ = judge_row([table.scored(made.exact[place], scores[place])], gate, levels)
            held = status == "enable" and held_too_much([memory_of(made, i, budget) for i in place], gate, 16)
            if status == "enable" and not held:
                found.add(number)
            elif made.one_policy:  # budgets go from large to small and stop
                break
        return found


class Before:
    """The rules of commit dc82097: each row by itself; its families came from the names of parameters."""

    def enabled(self, made: Made, subset: np.ndarray) -> set[int]:
        from kvgate.evals.gates import load_gate
        from kvgate.evals.statistics import confidence_bounds
        from kvgate.evals.verdict_pairs import Pair, family_of
        from kvgate.evals.verdict_rules import judge_suite, row_status, share_alpha

        from kvgate.evals import verdict_strata as strata

        # Limits are for tables only, but for the floors of a run that is looked at.
        strata.confidence_bounds = confidence_bounds if made.looks else lambda *_: (-1.0, 1.0)
        gate = load_gate("production")
        found: set[int] = set()
        stopped: set[str] = set()
        for number, (scores, budget) in enumerate(zip(made.rows, made.budgets, strict=True)):
            pairs = [
                Pair(light(made, i, made.exact[i]), light(made, i, scores[i]), made.cluster[i])  # type: ignore[arg-type]
                for i in subset
            ]
            judged = share_alpha([judge_suite("s", pairs, gate, sequential=made.looks)], gate)
            name = "policy" if made.one_policy else f"policy{number}"
            family = family_of(SimpleNamespace(policy=name, params={"tokens": budget}, protocol="p"))  # type: ignore[arg-type]
            if row_status(judged, gate)[0] == "enable" and family not in stopped:
                found.add(number)
            else:
                stopped.add(family)
        return found


def memory_of(made: Made, i: int, budget: int) -> SimpleNamespace:
    held = int(1024 * (made.resident or budget / made.length[i]))
    return SimpleNamespace(covered=False, native=False, budget=budget, length=made.length[i], resident_bytes=held,
                           exact_resident_bytes=1024, context_tokens=made.length[i])  # fmt: skip


@cache
def light_record(task: str, length: int, depth: float | None, score: float) -> SimpleNamespace:
    return SimpleNamespace(suite="s", task=task, length=length, depth=depth, score=score, output_tokens=1)


def light(made: Made, i: int, score: float) -> SimpleNamespace:
    """What the rules of before read of a record."""
    return light_record(made.task[i], made.length[i], made.depth[i], float(score))


def refused() -> bool:
    """Whether a plan of items that share their documents without a cluster is refused, as it must be before it runs."""
    from kvgate.evals.data.items import Exact, Item, Turn
    from kvgate.evals.run.dependence import require_declared

    turn = Turn((1,), Exact(("x",)))
    items = [
        Item("s", "t", i, 512, (*range(i // 5 * 1000, i // 5 * 1000 + 500), i), (turn,), f"c{i}") for i in range(10)
    ]
    try:
        require_declared(items)
    except ValueError:
        return True
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="checkout of commit dc82097")
    parser.add_argument("--replicates", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path("results/prove"))
    parser.add_argument("--only", help="one case")
    parser.add_argument(
        "--collect",
        nargs=2,
        type=Path,
        metavar=("BEFORE", "NOW"),
        help="only write the table, from what --side runs printed",
    )
    parser.add_argument("--side", choices=SIDES, help="judge one side only and print a line a case")
    options = parser.parse_args()
    names = [options.only] if options.only else list(CASES)
    if options.side == "before":  # such a case is the one above it, declared or run as one can now
        names = [name for name in names if not name.endswith(" now")]
    if options.side:
        for name in names:
            print(json.dumps([name, judged(name, options.replicates, options.side == "now")]), flush=True)
        return 0
    if options.collect:
        pairs = zip(SIDES, options.collect, strict=True)
        rates = {side: collected(path.read_text(), names, side) for side, path in pairs}
        done = [name for name in names if name in rates["before"] and name in rates["now"]]
        write(options.out, done, rates, options.replicates)
        return 0
    with ThreadPoolExecutor() as pool:
        sides = {side: pool.submit(run_side, side, names, options) for side in SIDES}
    rates = {side: found.result() for side, found in sides.items()}
    write(options.out, names, rates, options.replicates)
    return 0


def run_side(side: str, names: list[str], options: argparse.Namespace) -> dict[str, float]:
    here = Path(__file__).resolve().parents[1]
    root = options.before if side == "before" else here
    command = [sys.executable, __file__, "--side", side, "--replicates", str(options.replicates)]
    command += ["--only", options.only] if options.only else []
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(root / "src")}, check=True, text=True, stdout=subprocess.PIPE
    )
    return collected(done.stdout, names, side)


def collected(text: str, names: list[str], side: str) -> dict[str, float]:
    """Rates by case; a case of now only has the rate of the one above it before."""
    found: dict[str, float] = dict(json.loads(line) for line in text.splitlines())
    for before, name in pairwise(names):
        if side == "before" and before in found and name.endswith(" now"):
            found.setdefault(name, found[before])
    return {name: found[name] for name in names if name in found}


def write(out: Path, names: list[str], rates: dict[str, dict[str, float]], replicates: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    rows = [
        {"case": name, "wrong": CASES[name][0], "before": rates["before"][name], "now": rates["now"][name]}
        for name in names
    ]
    record = {"seed": SEED, "replicates": replicates, "before": "dc82097", "gate": "production", "cases": rows}
    (out / "cases.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    lines = [
        f"Share of {replicates:,} simulated runs with the wrong outcome, by the rules of commit dc82097 and of now "
        "(`benchmarks/gate_cases.py`).",
        "", "| case | the wrong outcome | before | now |", "|---|---|---|---|",
        *(f"| {row['case']} | {row['wrong']} | {row['before']:.3f} | {row['now']:.3f} |" for row in rows),
    ]  # fmt: skip
    (out / "cases.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
