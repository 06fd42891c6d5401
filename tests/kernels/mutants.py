"""Breaks the Triton kernels in meaningful ways, one at a time, and shows that the tests notice.

    python tests/kernels/mutants.py [--only NUMBER ...] [--timeout SECONDS]

Each mutant is a copy of the package in a temporary folder with one text replaced; the attention and move tests run
against it and stop at the first failure. A mutant that survives is a hole in the tests unless it is listed as
equivalent, with the reason. Exit 1 if any other survives. Not collected by pytest: it takes some minutes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import pytest
import torch
import triton  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutant:
    """Replace `old` by `new` (once, or everywhere) in a file of kernels/. `equivalent`: why no test can tell."""

    file: str
    old: str
    new: str
    what: str
    equivalent: str = ""


PARTS, ATTEND, MASS, MOVE, OPS, PAGES = (
    "triton_parts.py",
    "triton_attend.py",
    "triton_mass.py",
    "triton_move.py",
    "triton_ops.py",
    "triton_pages.py",
)
MUTANTS = [
    Mutant(PARTS, "alive & (((word >> slot) & 1) != 0)", "alive", "live words ignored"),
    Mutant(
        PARTS, "((word >> slot) & 1) != 0", "((word >> slot) & 1) > 0", "bit test by sign", "the masked bit is 0 or 1"
    ),
    Mutant(PARTS, "alive = index < limit\n", "alive = index <= limit\n", "one slot beyond the page count"),
    Mutant(
        PARTS,
        "(tables_ptr + logical, mask=alive",
        "(tables_ptr + logical, mask=index >= 0",
        "dead table entries read",
        "a table entry within the table may be read, only the page may not; its slots stay dead",
    ),
    Mutant(PARTS, ".to(tl.int64)\n        position", "\n        position", "32-bit page offsets"),
    Mutant(
        ATTEND, "mask=kv_mask, other=0.0)\n        v =", "mask=d_ok, other=0.0)\n        v =", "K loads not predicated"
    ),
    Mutant(
        ATTEND,
        "d[None, :], mask=kv_mask, other=0.0)\n        if UPCAST:",
        "d[None, :], mask=d_ok, other=0.0)\n        if UPCAST:",
        "V loads not predicated",
    ),
    Mutant(
        ATTEND, "(position[None, :] <= p[:, None])", "(position[None, :] < p[:, None])", "a token does not see itself"
    ),
    Mutant(
        ATTEND,
        "(position[None, :] > p[:, None] - window)",
        "(position[None, :] >= p[:, None] - window)",
        "window one too wide",
    ),
    Mutant(
        PARTS, "(position > p_low - window)", "(position > p_low - window + 1)", "window of the tile one too narrow"
    ),
    Mutant(
        PARTS,
        "(position >= start) & (position < end)",
        "(position >= start) & (position <= end)",
        "spans closed at the end",
    ),
    Mutant(
        PARTS,
        "(position >= start) & (position < end)",
        "(position > start) & (position < end)",
        "spans open at the start",
    ),
    Mutant(ATTEND, "exempt_ptr += row * spans * 2", "exempt_ptr += 0", "every row has row 0's spans"),
    Mutant(
        ATTEND,
        "(position[None, :] >= lower[:, None])",
        "(position[None, :] > lower[:, None])",
        "lower bound one too high",
    ),
    Mutant(ATTEND, "position < sink_end, scale", "position <= sink_end, scale", "one sink too many"),
    Mutant(
        ATTEND,
        "sink_end = tl.load(sink_end_ptr + row) if",
        "sink_end = tl.load(sink_end_ptr) if",
        "every row has row 0's sinks",
    ),
    Mutant(
        PARTS,
        'tl.dot(q_sink, tl.trans(k), input_precision="ieee") * scale',
        'tl.dot(q_sink, tl.trans(k), input_precision="ieee")',
        "sink logits not scaled",
    ),
    Mutant(
        PARTS,
        "1.0 - 2.0 / (1.0 + tl.exp(2.0 * s / softcap))",
        "1.0 - 2.0 / (1.0 + tl.exp(s / softcap))",
        "soft cap of half the logit",
    ),
    Mutant(
        ATTEND, "m_ok = (m < TOKENS * G) & (token < end)", "m_ok = m < TOKENS * G", "tokens of the next row attended"
    ),
    Mutant(
        ATTEND,
        'tl.where(new == float("-inf"), 0.0, new)\n        shrink = tl.exp2(highest - safe)\n        weights',
        "new\n        shrink = tl.exp2(highest - safe)\n        weights",
        "running maximum of -inf not guarded",
    ),
    Mutant(
        ATTEND,
        'highest = tl.full([BLOCK_M], float("-inf"), tl.float32)',
        "highest = tl.full([BLOCK_M], 0.0, tl.float32)",
        "running maximum starts at zero",
    ),
    Mutant(
        ATTEND, "total = total * shrink + tl.sum(weights, 1)", "total = total + tl.sum(weights, 1)", "sum not rescaled"
    ),
    Mutant(
        ATTEND, "acc = acc * shrink[:, None] + tl.dot(weights", "acc = acc + tl.dot(weights", "accumulator not rescaled"
    ),
    Mutant(ATTEND, "stop = tl.minimum(begin + SPLIT, limit)", "stop = limit", "splits overlap"),
    Mutant(
        ATTEND,
        "after = tl.maximum(after, tl.where(reach, index + 1, 0))",
        "after = tl.maximum(after, tl.where(reach, index, 0))",
        "scan ends one slot early",
    ),
    Mutant(
        ATTEND,
        "begin = tl.min(before, 0) // BLOCK_N * BLOCK_N",
        "begin = tl.min(before, 0) // BLOCK_N * BLOCK_N + BLOCK_N",
        "scan starts one block late",
    ),
    Mutant(
        ATTEND,
        "begin = tl.maximum(p_low - window + 1, 0) //",
        "begin = tl.maximum(p_low - window + BLOCK_N + 1, 0) //",
        "prefill window starts late",
    ),
    Mutant(
        ATTEND,
        "filled = (limit + SPLIT - 1) // SPLIT",
        "filled = (limit + SPLIT) // SPLIT",
        "merge reads a split nobody wrote",
    ),
    Mutant(
        ATTEND, "share = tl.exp2(peak - safe)", "share = tl.exp2(peak - peak)", "splits merged without their maximum"
    ),
    Mutant(
        ATTEND,
        "total = total * shrink + tl.sum(mass * share, 0)",
        "total = total + tl.sum(mass * share, 0)",
        "merge does not rescale its sum",
    ),
    Mutant(
        ATTEND,
        "highest * LN2 + tl.log(whole)))\n    tl.store(max_ptr",
        "highest + tl.log(whole)))\n    tl.store(max_ptr",
        "lse in base 2",
    ),
    Mutant(
        ATTEND, "query_head = head * G + m % G", "query_head = head * G + m // TOKENS", "query heads of a tile mixed up"
    ),
    Mutant(
        ATTEND, "if token >= end:\n        return", "if token > end:\n        return", "merge writes into the next row"
    ),
    Mutant(
        MASS,
        "(index < limit)[None, :] & (total > 0.0)[:, None]",
        "(index < limit + S)[None, :] & (total > 0.0)[:, None]",
        "decode mass of slots nobody scored",
    ),
    Mutant(MASS, "g < G", "g < BLOCK_G", "mass of the next kv head counted too"),
    Mutant(
        MASS,
        "tl.sum(weights, 0), mask=index < width)",
        "tl.sum(weights, 0) / G, mask=index < width)",
        "decode mass averaged",
    ),
    Mutant(MASS, "column += tl.sum(", "column = tl.sum(", "only the last tile's mass"),
    Mutant(MASS, "if tl.max(p, 0) >= earliest:", "if tl.max(p, 0) > earliest:", "first visible tile skipped"),
    Mutant(
        MASS,
        "m_ok = m_ok & (total > 0.0)\n",
        "",
        "mass of blind queries",
        "a blind query sees no slot, so its weights are zero, and its sum of zero is only a divisor of zeros",
    ),
    Mutant(
        MASS,
        "seen = alive[None, :] & (position[None, :] <= p[:, None])",
        "seen = alive[None, :] & (position[None, :] < p[:, None])",
        "mass without a token's own slot",
    ),
    Mutant(
        MASS,
        "tl.store(mass_ptr + (row * heads + head) * width + index, column, mask=index < width)",
        "tl.store(mass_ptr + (row * heads + head) * width + index, column)",
        "column mass beyond the row's width",
    ),
    Mutant(MOVE, "there = i < count", "there = i <= count", "one slot too many moved"),
    Mutant(MOVE, "* UNIT + i % UNIT", "* UNIT", "only the first slot of each page"),
    Mutant(MOVE, "tl.store(dst_positions_ptr", "tl.store(src_positions_ptr", "positions stay behind"),
    Mutant(MOVE, "d[None, :], v, mask=mask)", "d[None, :], k, mask=mask)", "K written as V"),
    Mutant(
        OPS,
        "kinds.setdefault(kind_of(tokens, launch.group), []).append(row)",
        "kinds.setdefault(kind_of(max(row_start), launch.group), []).append(row)",
        "kind of a row depends on the batch",
    ),
    Mutant(
        OPS,
        "facts = torch.zeros(",
        "facts = torch.ones(",
        "sums of blind queries not zero",
        "the merge, or without splits the tile, writes the sum of every query; only calls without any slot read these",
    ),
    Mutant(
        PAGES,
        "position_T[:, None].expand(slots_TH.shape)",
        "position_T[:1, None].expand(slots_TH.shape)",
        "every token has token 0's position",
    ),
]


def run(mutant: Mutant, timeout: int) -> str:
    """'killed', 'survived' or 'not applied'."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for room in ("kernels", "tests/kernels"):
            shutil.copytree(ROOT / room, root / room, ignore=shutil.ignore_patterns("__pycache__"))
        package = root / "src" / "kvgate"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "kernels").symlink_to(root / "kernels")
        for name in ("conftest.py", "pyproject.toml"):
            shutil.copy(ROOT / name, root / name)
        path = root / "kernels" / mutant.file
        text = path.read_text()
        if mutant.old not in text:
            return "not applied"
        path.write_text(text.replace(mutant.old, mutant.new))
        child = multiprocessing.get_context("fork").Process(target=_test, args=(root,))
        child.start()
        child.join(timeout)
        if child.is_alive():
            child.kill()
            child.join()
            return "killed (ran out of time)"
        if child.exitcode is not None and child.exitcode < 0:
            return "killed (crashed)"
        return {0: "survived", 1: "killed"}.get(child.exitcode or 0, f"broke the run with exit code {child.exitcode}")


def _test(root: Path) -> None:
    """The tests of a mutated tree, quick ones first, in a fork that finds torch and triton already imported."""
    os.chdir(root)
    sys.path.insert(0, str(root / "src"))
    os.environ["PYTHONPATH"] = str(root / "src")  # for tests that start Python
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115
    tests = [
        f"tests/kernels/test_{name}.py"
        for name in ("edges", "attention", "pages", "prefill", "guarded_memory", "large_pool")
    ]
    for speed in ("not slow", "slow"):
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:faulthandler", "-k", "not torch and not native"]
        code = int(pytest.main([*options, "-m", speed, *tests]))
        if code:
            sys.exit(code)
    sys.exit(0)


def main() -> int:
    """Run the mutants and print the score."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the mutants to run")
    parser.add_argument("--timeout", type=int, default=600, help="seconds a mutant may take")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    killed = equivalent = bad = 0
    for number, mutant in enumerate(MUTANTS):
        if arguments.only and number not in arguments.only:
            continue
        result = run(mutant, arguments.timeout)
        killed += result.startswith("killed")
        equivalent += result == "survived" and bool(mutant.equivalent)
        bad += not result.startswith("killed") and not (result == "survived" and mutant.equivalent)
        note = f" (equivalent: {mutant.equivalent})" if result == "survived" and mutant.equivalent else ""
        print(f"{number:3} {result}: {mutant.what}{note}", flush=True)
    print(f"{killed} killed, {equivalent} equivalent, {bad} survived or not applied")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
