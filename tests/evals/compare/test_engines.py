"""Engines that nobody here wrote, on loopback, with the embedded model's own weights.

They are large packages of their own: ``pip install 'kvgate[engines]'``, or name an interpreter that has them in
KVGATE_ENGINES_PYTHON. Without them these tests skip.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from kvgate.evals.compare.endpoints.client import Endpoint
from kvgate.evals.compare.endpoints.compare import EndpointComparison, Settings, compare_endpoints
from kvgate.evals.compare.engines.launcher import installed, launched
from kvgate.evals.judge.gates import load_gate
from kvgate.evals.plan.config import parse_plan

pytestmark = pytest.mark.slow
PLAN = {
    "name": "engines",
    "model": "embedded",
    "suites": [{"name": "retrieval", "counts": {512: 12}, "tasks": ["single", "key_value"]}],
    "policies": [{"use": "h2o", "budgets": [0.5]}],
}


def compared(engine: str, exact: list[str], candidate: list[str], out: Path) -> EndpointComparison:
    from kvgate.engine.embedded import find_gguf

    if not installed(engine):
        pytest.skip(f"{engine} is not installed (extra engines)")
    with ExitStack() as stack:
        urls = [stack.enter_context(launched(engine, find_gguf(), flags)) for flags in (exact, candidate)]
        settings = Settings(tokenizer="embedded", concurrency=1, flags=" ".join(candidate))
        sides = [Endpoint(url) for url in urls]
        return compare_endpoints(parse_plan(PLAN, "test"), *sides, settings, out, gate=load_gate("screen"))


def test_openvino_with_eviction_is_never_enabled(tmp_path: Path) -> None:
    found = compared("openvino", ["--kv", "f32"], ["--kv", "f32", "--evict", "32,64,128"], tmp_path / "out")
    assert found.verdict.status in ("block", "inconclusive")
    assert found.verdict.suites[0].difference < -0.2
    assert "kv_cache_precision" in found.exact.version


@pytest.mark.parametrize("precision", ["f32", "q8_0"])
def test_llama_cpp_against_itself_and_with_eight_bits_is_never_blocked(precision: str, tmp_path: Path) -> None:
    found = compared("llama.cpp", ["--kv", "f32"], ["--kv", precision], tmp_path / "out")
    assert found.verdict.status in ("enable", "inconclusive")
    assert abs(found.verdict.suites[0].difference) < 0.1
    assert found.noise.texts_differ == 0.0
