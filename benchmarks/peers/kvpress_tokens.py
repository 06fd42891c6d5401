"""Do policies keep the tokens that kvpress keeps? The embedded model in fp32, each side in an environment of its own.

kvpress asks for transformers below 5.3, so the script makes a virtual environment for it (network needed, once). The
shares are over (layer, kv head) lists: of lists with exactly the same tokens, and of tokens that are in both.

    python benchmarks/peers/kvpress_tokens.py [--venv .venv-kvpress] [--out results/policies/kvpress-0.5.5.json]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

from kvgate.compressors.catalog import policy_class
from kvgate.compressors.evidence import Need
from kvgate.compressors.policy import Policy
from kvgate.engine.embedded import embedded_folder
from kvgate.engine.engine import Engine
from kvgate.engine.models import LoadedModel, load_model
from kvgate.evals.data.tokens import Tokens
from kvgate.evals.suites.base import BuildSpec
from kvgate.evals.suites.catalog import suite_class

VERSION = "0.5.5"
NEEDED = (f"kvpress=={VERSION}", "transformers<5.3", "requests", "cachetools<6", "fire<0.7", "datasets", "numpy")
PRESSES = {
    "snapkv": "SnapKVPress",
    "tova": "TOVAPress",
    "expected_attention": "ExpectedAttentionPress",
    "streaming_llm": "StreamingLLMPress",
    "keydiff": "KeyDiffPress",
    "knorm": "KnormPress",
}
CASES = (("retrieval", "single", 512, 0.5), ("code", "constant", 1024, 0.25))


def main() -> None:
    """Run both sides and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=Path(".venv-kvpress"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    python = _environment(options.venv)
    loaded = load_model(dtype="float32")
    rows = []
    for suite, task, length, ratio in CASES:
        spec = BuildSpec(counts={length: 1}, tasks=(task,))
        ids = list(suite_class(suite)().build(Tokens(loaded.tokenizer), spec)[0].context)
        kept = int(ratio * len(ids))
        theirs = _theirs(python, ids, kept)
        for name in PRESSES:
            ours = _ours(loaded, ids, policy_class(name).for_budget(kept))
            rows.append({"policy": name, "press": PRESSES[name], "case": f"{suite}/{task}", "tokens": len(ids),
                         "kept": kept, **_agreement(ours, theirs[name])})  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        versions = subprocess.run([python, "-m", "pip", "freeze"], check=True, capture_output=True, text=True).stdout
        named = [line for line in versions.splitlines() if line.split("==")[0] in ("kvpress", "torch", "transformers")]
        options.out.write_text(json.dumps({"peer": named, "dtype": "float32", "rows": rows}, indent=1) + "\n")


def _environment(folder: Path) -> str:
    python = folder.absolute() / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        import torch

        subprocess.run([python, "-m", "pip", "install", "-q", f"torch=={torch.__version__}"], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", NEEDED[0]], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", *NEEDED[1:]], check=True)
    return str(python)


def _theirs(python: str, ids: list[int], kept: int) -> dict[str, list[list[list[int]]]]:
    with tempfile.TemporaryDirectory() as folder:
        job, answer = Path(folder) / "job.json", Path(folder) / "answer.json"
        asked = {"model": str(embedded_folder()), "ids": ids, "kept": kept, "presses": PRESSES}
        job.write_text(json.dumps(asked))
        side = Path(__file__).with_name("kvpress_side.py")
        subprocess.run([python, "-W", "ignore", str(side), str(job), str(answer)], check=True, stdout=sys.stderr)
        found: dict[str, list[list[list[int]]]] = json.loads(answer.read_text())
    return found


def _ours(loaded: LoadedModel, ids: list[int], policy: Policy) -> list[list[list[int]]]:
    heads = loaded.info.layers * loaded.info.kv_heads
    engine = Engine(loaded, pages=heads * (len(ids) // 16 + 2) * 2)
    needs: frozenset[Need] = policy.needs
    row, _ = engine.prefill(ids, needs=needs)
    child = engine.fork(row, policy)
    engine.evict(child)
    seen = engine.evidence(child)
    return [
        [sorted(where[live].tolist()) for where, live in zip(*layer, strict=True)]
        for layer in zip(seen.positions, seen.live, strict=True)
    ]


def _agreement(ours: list[list[list[int]]], theirs: list[list[list[int]]]) -> dict[str, Any]:
    pairs = [pair for layers in zip(ours, theirs, strict=True) for pair in zip(*layers, strict=True)]
    assert all(len(a) == len(b) for a, b in pairs), "they keep different numbers of tokens"
    same = sum(a == b for a, b in pairs) / len(pairs)
    shared = sum(len(set(a) & set(b)) for a, b in pairs) / sum(len(a) for a, _ in pairs)
    return {"same_lists": round(same, 4), "same_tokens": round(shared, 6)}


if __name__ == "__main__":
    main()
