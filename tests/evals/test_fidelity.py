"""Fidelity on a tiny random model: along the exact answer, against a step-by-step account in float64."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import yaml
from tiny_model import save_tiny_model

from kvgate.cli.main import main
from kvgate.compressors.h2o import H2O
from kvgate.compressors.sliding_window import SlidingWindow
from kvgate.engine.engine import Engine
from kvgate.engine.models import load_model
from kvgate.evals.data.items import Fidelity
from kvgate.evals.data.tokens import Tokens
from kvgate.evals.leaderboard.fidelity import fidelity_lines
from kvgate.evals.log.records import CellRecord
from kvgate.evals.run.fidelity import divergences, follow
from kvgate.evals.suites.base import BuildSpec
from kvgate.evals.suites.fidelity import OPENING, FidelitySuite


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return save_tiny_model(folder / "model", seed=3)


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return Engine(load_model(str(model), dtype="float32"), pages=600)


def start(engine: Engine, policies: list[Any]) -> tuple[list[Any], torch.Tensor]:
    prompt = [(7 * place) % 250 for place in range(60)]
    snapshot, _ = engine.prefill(prompt, needs=frozenset({"mass"}))
    rows = [engine.fork(snapshot, policy) for policy in policies]
    for row in rows:
        if row.policy is not None:
            engine.evict(row, compact=True)
    engine.release(snapshot)
    return rows, engine.extend(rows, [[11]] * len(rows))


def test_kl_and_agreement_against_an_account_in_float64(engine: Engine) -> None:
    policies = [None, H2O(8, 8), SlidingWindow(window=100), SlidingWindow(window=4)]
    rows, logits = start(engine, policies)
    found = follow(engine, rows, [0, 0, 0, 0], logits, [12] * 4, [frozenset()] * 4)
    again, logits = start(engine, policies)
    spoken, kl, own = [], [], []
    for _ in range(12):
        probabilities = torch.softmax(logits.double(), -1)
        kl.append([(probabilities[0] * (probabilities[0] / other).log()).sum().item() for other in probabilities])
        own.append(logits.argmax(-1).tolist())
        spoken.append(own[-1][0])
        logits = engine.extend(again, [[spoken[-1]]] * 4)
    for at, row in enumerate(found):
        assert row.tokens == [tokens[at] for tokens in own]
        assert row.kl == pytest.approx([values[at] for values in kl], abs=2e-6)
        assert row.agree == [tokens[at] == tokens[0] for tokens in own]
        assert row.capped
        assert row.pending == [spoken[-1]]
    assert found[0].tokens == spoken
    assert found[0].agreement == found[2].agreement == 1.0
    assert max(filter(None, found[3].kl)) > 1e-3
    for row in (*rows, *again):
        engine.release(row)


def test_the_exact_answer_ends_for_all_rows_at_once_and_the_end_is_a_position(engine: Engine) -> None:
    rows, logits = start(engine, [None, SlidingWindow(window=2)])
    free = follow(engine, rows, [0, 0], logits, [6] * 2, [frozenset()] * 2)[0].tokens
    end = free[4]
    first = free.index(end)
    again, logits = start(engine, [None, SlidingWindow(window=2)])
    found = follow(engine, again, [0, 0], logits, [6] * 2, [frozenset({end}), frozenset({end})])
    for row in found:
        assert len(row.tokens) == first
        assert len(row.kl) == len(row.agree) == first + 1
        assert not row.capped
        assert row.pending == []
    for row in (*rows, *again):
        engine.release(row)


def test_a_row_that_turns_to_nan_disagrees_and_says_so() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [float("nan"), 0.0, 0.0], [0.0, 1.0, 2.0]])
    assert divergences(logits, [0, 0, 0]) == [0.0, None, 0.0]

    class Still:
        """Logits never change."""

        def extend(self, rows: list[int], tokens: list[list[int]]) -> torch.Tensor:
            assert tokens == [[2]] * len(rows)
            return logits[rows]

    found = follow(Still(), [0, 1, 2], [0, 0, 0], logits, [3] * 3, [frozenset()] * 3)  # type: ignore[arg-type]
    assert [row.nan for row in found] == [False, True, False]
    assert found[1].agreement == 0.0
    assert found[1].record.kl == (None, None, None)
    assert found[1].record.diverged == 0
    assert found[2].record.diverged is None


def test_impossible_tokens_are_no_number() -> None:
    logits = torch.tensor([[0.0, 0.0, -torch.inf], [0.0, -torch.inf, 0.0]])
    assert divergences(logits, [0, 0]) == [0.0, None]


def test_items_have_their_length_and_hold_tokens_back(model: Path) -> None:
    tokens = Tokens(load_model(str(model), dtype="float32").tokenizer)
    items = FidelitySuite().build(tokens, BuildSpec(counts={200: 2, 700: 1}, seed=1))
    assert [(item.task, item.length) for item in items] == [
        (task, length) for task in FidelitySuite.tasks for length in (200, 200, 700)
    ]
    for item in items:
        assert len(item.context) == item.length
        assert isinstance(item.turns[0].scoring, Fidelity)
        assert len(item.turns[0].prompt) >= OPENING
    with pytest.raises(ValueError, match="new_tokens 0"):
        FidelitySuite().build(tokens, BuildSpec(options={"new_tokens": 0}))


def test_a_run_of_the_suite(model: Path, tmp_path: Path) -> None:
    plan = {
        "model": str(model), "dtype": "float32", "batch_rows": 12,
        "suites": [{"name": "fidelity", "counts": {256: 2}, "options": {"new_tokens": 8}}],
        "policies": [{"use": "streaming_llm", "budgets": [0.25]}, {"use": "h2o", "budgets": [0.5, 1000]}],
    }  # fmt: skip
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    assert main(["run", "--plan", str(tmp_path / "plan.yaml"), "--out", str(tmp_path / "r"), "--json"]) == 0
    schema = json.loads((files("kvgate") / "configs" / "schemas" / "sample.schema.json").read_text())
    lines = (tmp_path / "r" / "samples.jsonl").read_text().splitlines()
    records = [CellRecord.from_json(line) for line in lines]
    assert [record.to_json() for record in records] == lines
    exact = {record.item_hash: record for record in records if record.exact}
    assert len(records) == 4 * len(exact) == 24
    for line, record in zip(lines, records, strict=True):
        jsonschema.validate(json.loads(line), schema)
        turn = record.turns[0]
        assert turn.fidelity is not None
        assert len(turn.fidelity.kl) in (len(turn.tokens), len(turn.tokens) + 1)
        assert len(turn.tokens) == len(exact[record.item_hash].turns[0].tokens)
        if record.exact or record.covered:
            assert record.score == 1.0
            assert turn.fidelity.diverged is None
        elif turn.fidelity.diverged is not None and turn.fidelity.diverged < len(turn.tokens):
            at = turn.fidelity.diverged
            assert turn.tokens[:at] == exact[record.item_hash].turns[0].tokens[:at]
            assert turn.tokens[at] != exact[record.item_hash].turns[0].tokens[at]
    board = json.loads((tmp_path / "r" / "leaderboard.json").read_text())
    rows = {row["label"]: row["fidelity"] for row in board["rows"]}
    assert rows["h2o@1000"]["kl_max"] == rows["h2o@1000"]["diverged"] == 0
    assert rows["h2o@1000"]["first_divergence"] is None
    assert rows["h2o@0.5"]["kl_mean"] > 0
    assert rows["h2o@0.5"]["answers"] == 6
    assert len(list(fidelity_lines(board))) == 3
    checks = json.loads((tmp_path / "r" / "checks.json").read_text())
    assert {found["different"] for found in checks["repeat"].values()} == {0}
    assert {record.score for record in records if not record.exact and not record.covered} != {1.0}
