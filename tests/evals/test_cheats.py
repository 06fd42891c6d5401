"""Policies that try to look better than they are, run for real on a tiny model: none may pass as sound."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_model import save_tiny_model

from kvgate.cli.main import main
from kvgate.evals.log.run_folder import LEADERBOARD

CHEATS = '''
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvgate.compressors.evidence import Evidence, Keep
from kvgate.compressors.policy import Policy
from kvgate.compressors.ranking import keep_newest


@dataclass(frozen=True)
class Window(Policy):
    name: ClassVar[str] = "window"
    tokens: int

    @classmethod
    def for_budget(cls, budget):
        return cls(tokens=budget)

    @property
    def budget(self):
        return self.tokens

    def decide(self, evidence):
        return Keep(keep_newest(evidence, torch.zeros_like(evidence.live), self.tokens))


class KeepsAll(Window):
    """Evicts nothing, whatever it was given."""

    name = "keeps_all"

    def decide(self, evidence):
        return Keep.all(evidence)


class ClaimsMore(Window):
    """Says its budget is huge, so that nothing had to go."""

    name = "claims_more"

    @property
    def budget(self):
        return 1 << 40

    def decide(self, evidence):
        return Keep.all(evidence)


class Revives(Window):
    name = "revives"

    def decide(self, evidence):
        return Keep(torch.ones_like(evidence.live))


class WrongShape(Window):
    name = "wrong_shape"

    def decide(self, evidence):
        return Keep(evidence.live[0])


class Leaky(Window):
    """Remembers, beyond the sequence, how often it was asked, and keeps less and less."""

    name = "leaky"
    asked = []

    def decide(self, evidence):
        self.asked.append(1)
        return Keep(keep_newest(evidence, torch.zeros_like(evidence.live), max(1, self.tokens - len(self.asked))))


class DropsAll(Window):
    """Keeps one token and says nothing of it."""

    name = "drops_all"

    def decide(self, evidence):
        return Keep(keep_newest(evidence, torch.zeros_like(evidence.live), 1))
'''


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cheats")
    save_tiny_model(folder / "model")
    (folder / "cheats.py").write_text(CHEATS)
    plan = {
        "model": str(folder / "model"), "dtype": "float32", "batch_rows": 6, "policies": ["h2o"],
        "suites": [{"name": "retrieval", "counts": {410: 2}, "tasks": ["single"]}],
    }  # fmt: skip
    (folder / "plan.yaml").write_text(yaml.safe_dump(plan))
    return folder


def run(tiny: Path, out: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> int:
    monkeypatch.syspath_prepend(tiny)
    arguments = ["run", "--plan", str(tiny / "plan.yaml"), "--out", str(out), "--policy", f"cheats:{name}@50", "--json"]
    return main(arguments)


def row(out: Path) -> dict[str, Any]:
    (found,) = json.loads((out / LEADERBOARD).read_text())["rows"]
    return dict(found)


@pytest.mark.parametrize(
    "name, says",
    [
        ("KeepsAll", "keeps 410 tokens of a head, its budget is 50"),
        ("Revives", "keeps slots that are not live"),
        ("WrongShape", "expected torch.bool"),
        ("ClaimsMore", "gives itself a budget of 1099511627776, was asked for 50"),
    ],
)
def test_an_answer_that_breaks_the_rules_stops_the_run_by_name(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, name: str, says: str
) -> None:
    assert run(tiny, tmp_path / "r", monkeypatch, name) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert says in line
    assert not (tmp_path / "r" / LEADERBOARD).exists()


@pytest.mark.parametrize("name, says", [("Leaky", "carries state")])
def test_lies_that_show_in_the_records_make_the_row_invalid(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    assert run(tiny, tmp_path / "r", monkeypatch, name) == 0
    found = row(tmp_path / "r")
    assert found["status"] == "invalid"
    assert says in " ".join(found["reasons"])


def test_memory_and_eviction_are_measured_not_claimed(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(tiny, tmp_path / "r", monkeypatch, "DropsAll") == 0
    found = row(tmp_path / "r")
    assert found["evicted_tokens"] > 390
    assert found["memory"]["resident_share"] < found["memory"]["claimed_share"]
