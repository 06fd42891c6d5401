"""Names to policies, and policies that come from outside the package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvgate.compressors.catalog import catalog, check_parameters, parameters, policy_class
from kvgate.compressors.h2o import H2O
from kvgate.compressors.policy import Policy
from kvgate.compressors.streaming_llm import StreamingLLM

OUTSIDE = '''
from dataclasses import dataclass
from typing import ClassVar

from kvgate.compressors.evidence import Evidence, Keep
from kvgate.compressors.policy import Policy
from kvgate.compressors.ranking import keep_highest


@dataclass(frozen=True)
class Oldest(Policy):
    """Keeps the first tokens: a policy nobody wants, which makes it easy to see."""

    name: ClassVar[str] = "{name}"
    size: int

    @classmethod
    def for_budget(cls, budget: int, *, flavour: str = "plain") -> "Oldest":
        return cls(size=budget)

    @property
    def budget(self) -> int:
        return self.size

    def decide(self, evidence: Evidence) -> Keep:
        room = evidence.live.sum(-1).clamp_max(self.size)
        return Keep(keep_highest(-evidence.positions.long(), evidence.live, room))


class NotOne:
    pass
'''


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module with a policy, installed nowhere near kvgate."""
    name = f"outside_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(OUTSIDE.replace("{name}", "oldest"))
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def register(folder: Path, module: str, policy_name: str) -> None:
    """What installing a distribution with an entry point leaves behind."""
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[kvgate.policies]\n{policy_name} = {module}:Oldest\n")


def test_the_catalog_holds_classes_under_their_own_names() -> None:
    found = catalog()
    assert {"full", "sliding_window", "streaming_llm", "h2o"} <= set(found)
    for name, policy in found.items():
        assert issubclass(policy, Policy)
        assert policy.name == name
        assert policy_class(name) is policy


def test_a_policy_from_a_file_of_one_s_own(outside: str) -> None:
    policy = policy_class(f"{outside}:Oldest")
    assert policy.for_budget(7).budget == 7
    assert list(parameters(policy)) == ["flavour"]


def test_a_policy_from_another_distribution(outside: str, tmp_path: Path) -> None:
    register(tmp_path, outside, "oldest")
    assert policy_class("oldest").for_budget(3).budget == 3
    assert "h2o" in catalog()


def test_another_distribution_cannot_replace_our_own(outside: str, tmp_path: Path) -> None:
    register(tmp_path, outside, "h2o")
    with pytest.raises(ValueError, match=f"policy 'h2o': {outside}:Oldest would replace kvgate's own"):
        catalog()


@pytest.mark.parametrize(
    "name, says",
    [
        ("h20", f"policy 'h20' is unknown; known: {', '.join(sorted(catalog()))}"),
        ("", "is unknown"),
        ("no_such_module:Class", "No module named 'no_such_module'"),
        ("kvgate.compressors.h2o:H3O", "has no attribute 'H3O'"),
        ("kvgate.compressors.evidence:Span", "is not a subclass of kvgate.compressors.policy.Policy"),
        ("kvgate.compressors.ranking:score_keys", "is not a subclass"),
        (":H2O", "policy ':H2O'"),
        ("kvgate.compressors.h2o:", "policy 'kvgate.compressors.h2o:'"),
        ("kvgate.compressors.policy:Policy", "lacks budget, decide, for_budget, name"),
        ("..h2o:H2O", "policy '..h2o:H2O'"),
    ],
)
def test_what_is_no_policy_is_refused_in_one_line(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        policy_class(name)
    assert "\n" not in str(caught.value)


def test_an_outside_file_that_does_not_run_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_policy_file.py").write_text("def broken(:\n")
    (tmp_path / "dividing_policy_file.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="policy 'broken_policy_file:Mine': SyntaxError: invalid syntax"):
        policy_class("broken_policy_file:Mine")
    with pytest.raises(ValueError, match="policy 'dividing_policy_file:Mine': ZeroDivisionError: division by zero"):
        policy_class("dividing_policy_file:Mine")


def test_somebody_else_s_broken_distribution_does_not_take_our_own_away(outside: str, tmp_path: Path) -> None:
    (tmp_path / f"{outside}.py").write_text("import no_such_module\n")
    register(tmp_path, outside, "oldest")
    assert policy_class("h2o") is H2O
    with pytest.raises(ValueError, match="policy 'oldest': ModuleNotFoundError"):
        policy_class("oldest")


def test_an_entry_point_carries_the_policy_s_own_name(outside: str, tmp_path: Path) -> None:
    """Records show the class's name, configurations the entry point's: they must not differ."""
    register(tmp_path, outside, "newest")
    with pytest.raises(ValueError, match=f"policy 'newest': {outside}:Oldest calls itself 'oldest'"):
        catalog()


def test_parameters_are_those_of_for_budget() -> None:
    assert list(parameters(StreamingLLM)) == ["sinks", "positions"]
    check_parameters(StreamingLLM, {"sinks": 2, "positions": "rebased"})
    with pytest.raises(ValueError, match="policy streaming_llm: unknown parameter 'sink'; known: sinks, positions"):
        check_parameters(StreamingLLM, {"sink": 2})
    with pytest.raises(ValueError, match="policy h2o: unknown parameter 'budget'"):
        check_parameters(H2O, {"budget": 2})
    with pytest.raises(ValueError, match=r"policy full: unknown parameter 'window'; known: none$"):
        check_parameters(catalog()["full"], {"window": 2})
