"""What decides an outcome is one list, and each entry of it changes every cell's id and the config hash."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from tiny_model import save_tiny_model

from kvgate.engine.models import load_model
from kvgate.engine.tokenizer import load_tokenizer
from kvgate.evals.data.tokens import Tokens
from kvgate.evals.lm_eval.bench import Bench
from kvgate.evals.plan.cells import EXACT_CONFIGURATION
from kvgate.evals.plan.config import parse_plan
from kvgate.evals.run.identity import Identity, identity, template_hash, tokenizer_hash
from kvgate.evals.run.prepare import make_work

DATED = (
    "{{ strftime_now('%Y-%m-%d') }}|{% set day = strftime_now(\"%A\") %}{{ day + '|' + date_string }}|"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<a>"
)
PLAN: dict[str, Any] = {
    "name": "p", "suites": [{"name": "retrieval", "counts": {400: 1}, "tasks": ["single"]}],
    "policies": [{"policy": "h2o", "budgets": [0.5]}], "dtype": "float32",
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("identity") / "model")


def of(model: Path, **changes: Any) -> tuple[Identity, Any]:
    config = parse_plan({**PLAN, "model": str(model), **changes}, "p")
    loaded = load_model(str(model), dtype=config.dtype)
    return identity(config, loaded.info, loaded.tokenizer), loaded


def test_each_entry_changes_every_cell_and_the_config_hash(model: Path) -> None:
    who, loaded = of(model)
    config = parse_plan({**PLAN, "model": str(model)}, "p")
    work = make_work(config, loaded.tokenizer, who)
    other = {"stop_ids": (1, 2), "page_size": 32, "prefill_chunk": 9, "batch_rows": 9}
    for spec in fields(Identity):
        value = other.get(spec.name, "0" * 32)
        changed = make_work(config, loaded.tokenizer, replace(who, **{spec.name: value}))
        assert changed.config_hash != work.config_hash, spec.name
        ids = [{cell.cell_id for shard in made.shards for cell in shard.cells} for made in (work, changed)]
        assert not ids[0] & ids[1], spec.name


def test_lm_eval_runs_have_the_same_identity(model: Path) -> None:
    who, loaded = of(model)
    assert Bench(loaded, [EXACT_CONFIGURATION]).identity == who


def test_stop_ids_and_template_of_the_same_weights_are_another_identity(model: Path, tmp_path: Path) -> None:
    who, _ = of(model)
    tokenizer = load_tokenizer(str(model))
    assert (tokenizer_hash(tokenizer), template_hash(tokenizer)) == (who.tokenizer_hash, who.template_hash)
    tokenizer.encode("truncation is no part of it", max_length=9, truncation=True)
    assert tokenizer_hash(tokenizer) == who.tokenizer_hash
    tokenizer.chat_template = DATED
    assert template_hash(tokenizer) != who.template_hash
    tokenizer.add_tokens(["<new>"])
    assert tokenizer_hash(tokenizer) != who.tokenizer_hash


def test_a_template_that_prints_the_date_gets_the_plans(model: Path) -> None:
    """Both ways in which templates ask for it; today's date is in neither."""
    tokenizer = load_tokenizer(str(model))
    tokenizer.chat_template = DATED
    for date, shown in (
        ("2024-07-26", "2024-07-26|Friday|26 Jul 2024|"),
        ("2031-01-02", "2031-01-02|Thursday|02 Jan 2031|"),
    ):
        assert tokenizer.decode(list(Tokens(tokenizer, date).chat.opening)).startswith(shown)
    tokenizer.chat_template = DATED.replace("'%Y-%m-%d'", "'%Y' + '-%m'")
    with pytest.raises(ValueError, match="cannot be read"):
        Tokens(tokenizer).chat  # noqa: B018  # built when it is asked for


@pytest.mark.parametrize("date", ["26 Jul 2024", "2024-7-26", "2024-02-30", "tomorrow", ""])
def test_a_date_is_a_day(date: str) -> None:
    with pytest.raises(ValueError, match="date is"):
        parse_plan({**PLAN, "date": date}, "p")
