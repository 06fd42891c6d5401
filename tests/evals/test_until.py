"""``--until-decided``: rounds, stops, caps and resuming, on a tiny model; fidelity makes its exact run competent."""

from __future__ import annotations

import json
from collections import Counter
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from tiny_model import save_tiny_model

from kvgate.cli.main import main
from kvgate.evals.data.items import Exact, Item, Turn
from kvgate.evals.judge.gates import Gate
from kvgate.evals.leaderboard.finished import load_run
from kvgate.evals.log.names import LEADERBOARD, MANIFEST, SAMPLES, SEAL, STOP
from kvgate.evals.plan.config import UntilDecided, parse_plan
from kvgate.evals.run.early_stopping import EarlyStopping, round_shards, rounds

GATE = {
    "m_suite": 0.1, "m_slice": 0.2, "floor": 0.5, "min_items": 8, "min_clusters": 8, "min_slice_clusters": 4,
    "slice_by": ["length"], "shadow_only": True, "canary_fraction": 0.0,
}  # fmt: skip


def item(index: int, length: int = 512, cluster: str | None = None, suite: str = "s", depth: float = 0.1) -> Item:
    turn = Turn((1,), Exact(("x",)))
    name = cluster or f"{suite}-{length}-{index}"
    return Item(suite, "t", index, length, (index, length), (turn,), name, depth=depth)


def gate(**changed: Any) -> Gate:
    return Gate("g", **{**GATE, "slice_by": ("length",), **changed})


def test_rounds_hold_every_slice_in_proportion_and_clusters_whole() -> None:
    items = [item(i, 512, f"c{i // 2}") for i in range(20)] + [item(i, 1024, f"d{i}") for i in range(40)]
    items += [item(i, 512, suite="other") for i in range(20)]
    made = rounds(items, gate(), seed=3)
    assert len(made) == 10  # the smallest slice: ten clusters of two
    assert sorted(map(id, (each for group in made for each in group))) == sorted(map(id, items))
    for group in made:
        assert Counter((each.suite, each.length) for each in group) == {
            ("s", 512): 2,
            ("s", 1024): 4,
            ("other", 512): 2,
        }
    where = {each.item_hash: place for place, group in enumerate(made) for each in group}
    for one, other in pairwise(items[:20]):
        if one.cluster == other.cluster:
            assert where[one.item_hash] == where[other.item_hash]


def test_rounds_are_fixed_by_the_seed_and_do_not_follow_the_order_of_the_source() -> None:
    items = [item(i) for i in range(30)]
    orders = [[each.index for group in rounds(items, gate(), seed) for each in group] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert orders[0] != sorted(orders[0])


def test_items_of_one_context_stay_together_whatever_their_clusters() -> None:
    items = [Item("s", "t", i, 512, (i // 3,), (Turn((1,), Exact(("x",))),), f"own{i}") for i in range(12)]
    for group in rounds(items, gate(), 0):
        assert len({each.context_hash for each in group}) == 1
        assert len(group) == 3


def test_units_are_counted_through_and_never_span_rounds() -> None:
    from kvgate.evals.plan.cells import EXACT_CONFIGURATION

    made = rounds([item(i) for i in range(6)] + [item(i, 1024) for i in range(3)], gate(), 0)
    batches = round_shards(made, [EXACT_CONFIGURATION], 2, "f")
    assert [shard.index for batch in batches for shard in batch] == list(range(6))
    assert [[len(shard.items) for shard in batch] for batch in batches] == [[2, 1]] * 3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("until")
    (folder / "gate.yaml").write_text(yaml.safe_dump(GATE))
    plan = {
        "model": str(save_tiny_model(folder / "model", seed=3)), "dtype": "float32", "gate": str(folder / "gate.yaml"),
        "suites": [
            {"name": "fidelity", "counts": {600: 20, 700: 20}, "tasks": ["continue"], "options": {"new_tokens": 6}}
        ],
        "policies": [{"use": "sliding_window", "budgets": [2]}],
    }  # fmt: skip
    return {"folder": folder, "plan": plan}


def go(tiny: dict[str, Any], out: Path, *more: str, code: int = 0, **changed: Any) -> dict[str, Any]:
    path = out.parent / f"{out.name}.yaml"
    path.write_text(yaml.safe_dump({**tiny["plan"], "name": "until", **changed}))
    assert main(["run", "--plan", str(path), "--out", str(out), "--json", *more]) == code
    return json.loads((out / LEADERBOARD).read_text()) if code == 0 else {}


def test_a_run_stops_as_soon_as_the_loss_is_proved_and_says_so(
    tiny: dict[str, Any], tmp_path: Path, capsys: Any
) -> None:
    board = go(tiny, tmp_path / "r", "--until-decided")
    stopped = board["stopped"]
    assert board["rows"][0]["status"] == "block"
    assert stopped["rule"] == "decided"
    assert stopped["deterministic"]
    assert stopped["planned"] == 40
    assert 2 * stopped["looks"] <= stopped["items"] < 40  # a round has one cluster of each length
    assert stopped["open"] == []
    assert len((tmp_path / "r" / SAMPLES).read_text().splitlines()) == 2 * stopped["items"]
    schema = json.loads((files("kvgate") / "configs" / "schemas" / "leaderboard.schema.json").read_text())
    jsonschema.validate(board, schema)
    assert load_run(tmp_path / "r").leaderboard() == board
    capsys.readouterr()
    assert main(["show", str(tmp_path / "r")]) == 0
    assert f"stopped after {stopped['items']} of 40 items" in capsys.readouterr().out


@pytest.mark.parametrize(
    "cut", [0, 2000, pytest.param(1, marks=pytest.mark.slow), pytest.param(-1, marks=pytest.mark.slow)]
)
def test_a_killed_run_stops_at_the_same_item_with_the_same_bytes(
    tiny: dict[str, Any], tmp_path: Path, cut: int
) -> None:
    go(tiny, tmp_path / "r", "--until-decided")
    names = (SAMPLES, LEADERBOARD, STOP, SEAL, "checks.json")
    whole = {name: (tmp_path / "r" / name).read_bytes() for name in names}
    for name in names[1:]:
        (tmp_path / "r" / name).unlink()
    (tmp_path / "r" / SAMPLES).write_bytes(whole[SAMPLES][:cut])
    go(tiny, tmp_path / "r", "--until-decided")
    assert {name: (tmp_path / "r" / name).read_bytes() for name in names} == whole


def test_caps(tiny: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    board = go(tiny, tmp_path / "a", "--until-decided", "--max-items", "5")
    assert board["stopped"]["rule"] == "items"
    assert 2 <= board["stopped"]["items"] <= 5
    assert board["stopped"]["open"] == ["sliding_window@2 (question_unseen)"]
    board = go(tiny, tmp_path / "b", "--until-decided", "--max-minutes", "1e-9")
    assert (board["stopped"]["rule"], board["stopped"]["looks"]) == ("minutes", 1)
    assert not board["stopped"]["deterministic"]
    assert "another machine" in board["stopped"]["reason"]
    before = (tmp_path / "b" / LEADERBOARD).read_bytes()
    go(tiny, tmp_path / "b", "--until-decided", "--max-minutes", "1e-9")  # a finished run does not go on
    assert (tmp_path / "b" / LEADERBOARD).read_bytes() == before
    capsys.readouterr()
    go(tiny, tmp_path / "c", "--until-decided", "--max-items", "1", code=2)
    assert "the first round alone has" in capsys.readouterr().err
    go(tiny, tmp_path / "d", "--max-items", "9", code=2)
    assert "--until-decided" in capsys.readouterr().err
    assert not (tmp_path / "d").exists()


def test_a_question_that_stays_open_uses_all_items_and_the_order_changes_no_score(
    tiny: dict[str, Any], tmp_path: Path
) -> None:
    few = [{**tiny["plan"]["suites"][0], "counts": {600: 3, 700: 3}}]
    board = go(tiny, tmp_path / "a", suites=few, until_decided=True)
    assert (board["stopped"]["rule"], board["stopped"]["items"]) == ("exhausted", 6)
    plain = go(tiny, tmp_path / "b", suites=few)
    assert "stopped" not in plain
    scores = [
        {(r.item_hash, r.label): r.score for r in load_run(tmp_path / name).records} for name in ("a", "b")
    ]  # fmt: skip
    assert scores[0] == scores[1]


def test_the_plan_and_its_caps_belong_to_the_run(tiny: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    go(tiny, tmp_path / "r", "--until-decided", "--max-items", "5")
    before = (tmp_path / "r" / MANIFEST).read_bytes()
    go(tiny, tmp_path / "r", "--until-decided", "--max-items", "40", code=2)
    assert "another plan" in capsys.readouterr().err
    assert (tmp_path / "r" / MANIFEST).read_bytes() == before


@pytest.mark.parametrize("raw", [3, {"items": 0}, {"minutes": 0}, {"minutes": float("nan")}, {"hours": 1}])
def test_bad_caps_are_named(tiny: dict[str, Any], raw: Any) -> None:
    with pytest.raises(ValueError, match="until_decided"):
        parse_plan({**tiny["plan"], "name": "x", "until_decided": raw}, "plan")


def test_minutes_of_an_earlier_process_do_not_count() -> None:
    now = iter([0.0, 600.0, 600.0])
    stopping = EarlyStopping(gate(), UntilDecided(minutes=5.0), ["x"] * 10, clock=lambda: next(now))
    assert not stopping.look((), [], fresh=False)
    assert stopping.look((), [], fresh=True)
    assert stopping.rule == "minutes"


@pytest.mark.slow
def test_several_seeds_are_one_run_with_one_verdict(tiny: dict[str, Any], tmp_path: Path, capsys: Any) -> None:
    few = [{**tiny["plan"]["suites"][0], "counts": {600: 4, 700: 4}}]
    one = go(tiny, tmp_path / "one", suites=few)
    three = go(tiny, tmp_path / "three", "--seeds", "11,12,13", suites=few)
    assert (one["rows"][0]["items"], three["rows"][0]["items"]) == (8, 24)
    assert three["rows"][0]["clusters"] == 24
    assert three["plan"]["seeds"] == [11, 12, 13]
    records = load_run(tmp_path / "three").records
    assert len({record.context_hash for record in records}) == 24
    assert {record.cluster.rpartition("-")[2] for record in records} == {"seed11", "seed12", "seed13"}
    go(tiny, tmp_path / "bad", "--seeds", "1,x", code=2)
    assert "--seeds '1,x'" in capsys.readouterr().err
    go(tiny, tmp_path / "bad", "--seeds", "1,1", code=2)
    assert "list each seed once" in capsys.readouterr().err
    go(tiny, tmp_path / "bad", "--primary", "nothing@2", code=2)
    assert "primary is 'nothing@2'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_watched_run_in_another_order_is_refused(tiny: dict[str, Any], tmp_path: Path) -> None:
    from kvgate.evals.log.run_folder import write_seal

    go(tiny, tmp_path / "r", "--until-decided", "--max-items", "6")
    lines = (tmp_path / "r" / SAMPLES).read_text().splitlines(keepends=True)
    (tmp_path / "r" / SAMPLES).write_text("".join(lines[4:] + lines[:4]))
    write_seal(tmp_path / "r")
    with pytest.raises(ValueError, match="rounds of the order drawn before the run"):
        load_run(tmp_path / "r")
