"""Leading blank lines are not the answer: they neither end it nor cost its score."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import save_tiny_model

from kvgate.engine.engine import Engine
from kvgate.engine.models import load_model
from kvgate.evals.data.items import Exact, Item, Turn
from kvgate.evals.plan.cells import EXACT_CONFIGURATION, shards
from kvgate.evals.run.runner import Runner
from kvgate.evals.scoring.again import contradictions


@pytest.fixture
def loaded(tmp_path: Path) -> Any:
    return load_model(str(save_tiny_model(tmp_path / "model")), dtype="float32")


@pytest.mark.parametrize("said, shown", [("\n\n\n42\nno", "\n\n\n42"), ("42\nno", "42"), ("  \n 42\nno", "  \n 42")])
def test_a_newline_stops_only_what_has_begun(
    loaded: Any, monkeypatch: pytest.MonkeyPatch, said: str, shown: str
) -> None:
    """The model is made to write ``said``, whatever it is fed."""
    tokenizer = loaded.tokenizer
    script = tokenizer.encode(said)
    (newline,) = tokenizer.encode("\n")
    turn = Turn(tuple(tokenizer.encode("?")), Exact(("42",), "first"), 14, stop=(newline,))
    item = Item("s", "t", 0, 8, tuple(tokenizer.encode("context ")), (turn,), "c")
    engine = Engine(loaded, pages=200)
    real, at = engine.extend, iter(range(100))

    def scripted(rows: Any, tokens: Any, **options: Any) -> torch.Tensor:
        logits = torch.zeros_like(real(rows, tokens, **options))
        if rows[0].length > len(item.context):
            logits[:, script[next(at)]] = 1.0
        return logits

    monkeypatch.setattr(engine, "extend", scripted)
    (shard,) = shards([item], [EXACT_CONFIGURATION], 4, "f")
    (record,) = Runner(engine, tokenizer, "hash").run(shard)
    assert (record.turns[0].text, record.score) == (shown, 1.0)
    stops = loaded.info.stop_ids
    assert list(contradictions(item, record, record, stops, tokenizer.decode)) == []
    went_on = replace(record.turns[0], tokens=tuple(script[: len(record.turns[0].tokens) + 2]))
    forged = replace(record, turns=(replace(went_on, text=tokenizer.decode(list(went_on.tokens))),))
    assert any(
        field == "turns[0].tokens" for field, *_ in contradictions(item, forged, forged, stops, tokenizer.decode)
    )
