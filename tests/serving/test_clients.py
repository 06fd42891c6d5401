"""Clients that others wrote, against a live server on loopback: what they ask for is what they get."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from live_server import Live, tiny_chat_model

from kvgate.engine.models import load_model

PROBE = Path(__file__).resolve().parents[3] / "shared" / "clients" / "probe_openai.py"
WORDS = ["amber", "birch", "cedar", "dune", "ember", "fjord", "grove", "heath"]


def local_tasks(folder: Path) -> None:
    """One task by likelihood and one by generation, on random words."""
    rng = random.Random(1)
    rows = [
        {"text": " ".join(rng.choices(WORDS, k=12 + i)) + "\nAnswer:", "choices": rng.sample(WORDS, 4), "gold": i % 4}
        for i in range(10)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"data_files": {"test": str(folder / "rows.jsonl")}, "cache_dir": str(folder / "cache")}
    base = {"dataset_path": "json", "dataset_kwargs": data, "test_split": "test", "doc_to_text": "{{text}}"}
    kinds: dict[str, dict[str, Any]] = {
        "served_choice": {
            "output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{gold}}",
            "metric_list": [{"metric": "acc"}],
        },
        "served_answer": {
            "output_type": "generate_until", "doc_to_target": "{{text}}", "metric_list": [{"metric": "exact_match"}],
            "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False},
        },
    }  # fmt: skip
    for name, kind in kinds.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **base, **kind}))


@pytest.mark.slow
def test_lm_eval_scores_the_server_as_it_scores_the_engine(tmp_path: Path) -> None:
    pytest.importorskip("tenacity", reason="lm-eval's API models need tenacity: pip install 'lm-eval[api]'")
    import lm_eval
    import lm_eval.models  # registers local-completions
    from lm_eval.tasks import TaskManager

    from kvgate.evals.lm_eval.model import KvgateLM

    folder = tiny_chat_model(tmp_path / "model", seed=5)
    local_tasks(tmp_path)
    options: dict[str, Any] = {"tasks": ["served_choice", "served_answer"], "bootstrap_iters": 0, "log_samples": True}
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    own = lm_eval.simple_evaluate(model=KvgateLM(str(folder), dtype="float32"), task_manager=manager, **options)
    with Live(load_model(str(folder), dtype="float32")) as live:
        args = {
            "model": "tiny", "base_url": f"{live.url}/v1/completions", "tokenizer": str(folder), "num_concurrent": 4,
            "tokenizer_backend": "huggingface", "max_retries": 1,
        }  # fmt: skip
        served = lm_eval.simple_evaluate(model="local-completions", model_args=args, task_manager=manager, **options)
        live.audit()
    for ours, theirs in zip(own["samples"]["served_choice"], served["samples"]["served_choice"], strict=True):
        for (mine, greedy), (other, theirs_greedy) in zip(
            ours["filtered_resps"], theirs["filtered_resps"], strict=True
        ):
            assert float(other) == pytest.approx(float(mine), abs=1e-5)
            assert str(greedy) == str(theirs_greedy)
    assert own["results"]["served_choice"]["acc,none"] == served["results"]["served_choice"]["acc,none"]
    answers = [[sample["filtered_resps"] for sample in run["samples"]["served_answer"]] for run in (own, served)]
    assert answers[0] == answers[1]


@pytest.mark.slow
@pytest.mark.skipif(not PROBE.exists(), reason=f"{PROBE} is not there")
def test_the_openai_probe_against_the_embedded_model_and_a_drain(tmp_path: Path) -> None:
    """``kvgate serve`` as users start it; ends with SIGTERM while an answer is being written."""
    import openai

    started = subprocess.Popen(
        [sys.executable, "-m", "kvgate", "serve", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert started.stdout is not None
        url = started.stdout.readline().split()[0]
        done = subprocess.run([sys.executable, PROBE, url, "embedded"], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        assert "bad accepted" not in done.stdout
        assert "Traceback" not in done.stdout
        assert done.stdout.count("\nerror ") == 4
        assert "['content.delta', 'chunk', 'content.done']" in done.stdout
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
        ask: dict[str, Any] = {
            "model": "embedded",
            "prompt": "Once",
            "max_tokens": 60,
            "stream": True,
            "temperature": 0,
        }
        with client.completions.create(**ask, logit_bias={"2": -100, "0": -100}) as stream:
            pieces = iter(stream)
            next(pieces)
            started.terminate()
            assert [piece.choices[0].finish_reason for piece in pieces][-1] == "length"
        assert started.wait(60) == 0
        assert started.stderr is not None
        assert "Traceback" not in started.stderr.read()
    finally:
        started.kill()
        started.wait()
