"""What holds for every suite: exact lengths, whole evidence, one seed one set of bytes, errors that name the field."""

import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvgate.cli.main import main
from kvgate.evals.data.items import Choice, Exact, Item, Recall
from kvgate.evals.data.tokens import Tokens
from kvgate.evals.scoring.scores import score_answer
from kvgate.evals.suites.base import BuildSpec, Suite
from kvgate.evals.suites.catalog import OWN, catalog, suite_class

COUNTS = {512: 2, 700: 1}
NAMES = [suite.name for suite in OWN]
# Fidelity asks for nothing: any text of any length will do.
ASKING = [name for name in NAMES if name != "fidelity"]


@pytest.fixture(scope="module")
def built(tokens: Tokens) -> dict[str, list[Item]]:
    return {suite.name: suite().build(tokens, BuildSpec(counts=COUNTS)) for suite in OWN}


@pytest.mark.parametrize("name", NAMES)
def test_lengths_are_exact(built: dict[str, list[Item]], name: str) -> None:
    for item in built[name]:
        assert len(item.context) == item.length
        assert item.longest > item.length


@pytest.mark.parametrize("name", NAMES)
def test_every_task_and_length_has_its_count(built: dict[str, list[Item]], name: str) -> None:
    suite = suite_class(name)()
    for task in suite.chosen(()):
        for length, count in COUNTS.items():
            found = [item.index for item in built[name] if (item.task, item.length) == (task, length)]
            assert found == list(range(count))


@pytest.mark.parametrize("name", ASKING)
def test_evidence_is_whole(built: dict[str, list[Item]], name: str, chatml: Any) -> None:
    for item in built[name]:
        if item.task == "count":  # nothing to find: the text is only there to be in the way
            continue
        assert item.facts, item.task
        told = " ".join(chatml.decode(item.context[start:end]) for start, end in item.facts)
        for turn in item.turns:
            if isinstance(turn.scoring, Exact):
                assert turn.scoring.accept[0] in told


@pytest.mark.parametrize("name", NAMES)
def test_the_answer_is_not_in_the_question(built: dict[str, list[Item]], name: str, chatml: Any) -> None:
    for item in built[name]:
        for turn in item.turns:
            if isinstance(turn.scoring, Exact):
                assert turn.scoring.accept[0] not in chatml.decode(turn.prompt)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_cut_by_its_own_cap(built: dict[str, list[Item]], name: str, tokens: Tokens) -> None:
    for item in built[name]:
        for turn in item.turns:
            if isinstance(turn.scoring, Exact):
                assert len(tokens.encode(" " + turn.scoring.accept[0])) < turn.max_new_tokens


@pytest.mark.parametrize("name", NAMES)
def test_contexts_do_not_share_a_prefix(built: dict[str, list[Item]], name: str) -> None:
    """No fixed haystack: past the template and the introduction, contexts are different."""
    twins = suite_class(name).twins
    contexts = [item.context for item in built[name] if item.task not in twins]
    assert len({context[96:160] for context in contexts}) == len(contexts)


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_items(built: dict[str, list[Item]], name: str, chatml: Any) -> None:
    random.seed(99)
    again = suite_class(name)().build(Tokens(chatml), BuildSpec(counts=COUNTS))
    assert [item.item_hash for item in again] == [item.item_hash for item in built[name]]
    other = suite_class(name)().build(Tokens(chatml), BuildSpec(counts=COUNTS, seed=1))
    assert not {item.item_hash for item in other} & {item.item_hash for item in built[name]}


@pytest.mark.parametrize("name", NAMES)
def test_more_items_keep_the_first_ones(built: dict[str, list[Item]], name: str, tokens: Tokens) -> None:
    more = suite_class(name)().build(tokens, BuildSpec(counts={512: 3}))
    fewer = [item.item_hash for item in built[name] if item.length == 512]
    assert [item.item_hash for item in more if item.index < 2] == fewer


@pytest.mark.parametrize("name", ASKING)
def test_depth_says_where_the_evidence_is(tokens: Tokens, name: str) -> None:
    suite = suite_class(name)()
    tasks = tuple(task for task in suite.chosen(()) if task not in suite.loose_depths)
    for item in suite.build(tokens, BuildSpec(counts={2048: 2}, depths=(0.1, 0.9), tasks=tasks)):
        if item.depth is None:
            assert name in ("instructions", "long_generation")
            continue
        last = max(start for start, _ in item.facts) if name == "multi_turn" else item.facts[0][0]
        if item.task == "recite":
            continue  # long beside its context: see test_suites_long.py
        assert abs(last / item.length - item.depth) < 0.2, (item.task, item.depth, last)


@pytest.mark.parametrize("name", NAMES)
def test_documents_itself(name: str) -> None:
    suite = suite_class(name)
    assert suite.measures
    assert suite.why_eviction_hurts
    assert 0 < suite.floor <= 1
    assert all(suite.tasks.values())


def test_twins_differ_in_one_thing(built: dict[str, list[Item]]) -> None:
    system = [item for item in built["instructions"] if item.task == "system"]
    protected = [item for item in built["instructions"] if item.task == "system_protected"]
    assert [item.context for item in system] == [item.context for item in protected]
    assert all(item.protected == item.facts for item in protected)
    assert not any(item.protected for item in system)
    unaware = [item for item in built["shared"] if item.task == "unaware"]
    aware = [item for item in built["shared"] if item.task == "aware"]
    for one, other in zip(unaware, aware, strict=True):
        assert [turn.scoring for turn in one.turns] == [turn.scoring for turn in other.turns]
        first = one.turns[0].prompt[: len(one.turns[0].prompt) - len(other.turns[0].prompt)]
        assert other.context[-len(first) :] == first  # the first question, already in the context


@pytest.mark.parametrize("task", sorted(suite_class("retrieval").optional))
def test_several_answers(tokens: Tokens, chatml: Any, task: str) -> None:
    for item in suite_class("retrieval")().build(tokens, BuildSpec(counts={512: 2}, tasks=(task,))):
        scoring = item.turns[0].scoring
        assert isinstance(scoring, Recall)
        context = chatml.decode(item.context)
        assert len(set(scoring.expected)) == len(scoring.expected) > 1
        assert all(wanted in context for wanted in scoring.expected)
        assert score_answer(", ".join(scoring.expected), scoring) == 1.0


def test_the_commonest_words_are_the_commonest(tokens: Tokens, chatml: Any) -> None:
    for task in ("common_words", "frequent_words"):
        for item in suite_class("retrieval")().build(tokens, BuildSpec(counts={2048: 2}, tasks=(task,))):
            scoring = item.turns[0].scoring
            assert isinstance(scoring, Recall)
            counts = Counter(chatml.decode(item.context).split("\n")[-1].split())
            assert {word for word, _ in counts.most_common(len(scoring.expected))} == set(scoring.expected)


def test_instructions_beyond_the_embedded_model(tokens: Tokens) -> None:
    items = suite_class("instructions")().build(tokens, BuildSpec(counts={512: 2}, tasks=("format", "leak")))
    assert {turn.label for item in items for turn in item.turns} == {
        "persona", "capitals", "forbidden", "language", "ending", "leak"
    }  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_what_a_plan_counts_by_depth_has_one(built: dict[str, list[Item]], name: str) -> None:
    for item in built[name]:
        assert suite_class(name).has_depth(item.task) == (item.depth is not None), item.task


def test_fewer_tasks_keep_the_same_items(tokens: Tokens, built: dict[str, list[Item]]) -> None:
    some = suite_class("retrieval")().build(tokens, BuildSpec(counts=COUNTS, tasks=("assignment",)))
    assert [item.item_hash for item in some] == [
        item.item_hash for item in built["retrieval"] if item.task == "assignment"
    ]


def test_choices_are_different(built: dict[str, list[Item]]) -> None:
    choices = [turn.scoring for item in built["code"] for turn in item.turns if isinstance(turn.scoring, Choice)]
    assert choices
    for choice in choices:
        assert len(set(choice.candidates)) == 4
        assert 0 <= choice.gold < 4


def test_works_without_a_template(plain: Any) -> None:
    for suite in OWN:
        for item in suite().build(Tokens(plain), BuildSpec(counts={512: 1})):
            assert len(item.context) == 512


@pytest.mark.parametrize("name", ASKING)
def test_too_short_is_refused(tokens: Tokens, name: str) -> None:
    with pytest.raises(ValueError, match="ask for"):
        suite_class(name)().build(tokens, BuildSpec(counts={64: 1}))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"tasks": ("nope",)}, "unknown task 'nope'"),
        ({"options": {"nope": 1}}, "unknown option 'nope'"),
    ],
)
def test_unknown_names_are_refused(tokens: Tokens, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        suite_class("retrieval")().build(tokens, BuildSpec(**change))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"counts": {8: 1}}, "8 is too short"),
        ({"counts": {512: -1}}, "-1 items"),
        ({"depths": (1.5,)}, "numbers from 0 to 1"),
        ({"depths": ()}, "numbers from 0 to 1"),
    ],
)
def test_bad_orders_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BuildSpec(**change)


OUTSIDE = """
from kvgate.evals.suites.base import Generated
class Mine(Generated):
    name = "mine"
    measures = why_eviction_hurts = "x"
    tasks = {"t": "x"}
    def make(self, tokens, group):
        return []
class NotASuite: ...
"""


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "outside_suites.py").write_text(OUTSIDE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_suite_from_outside_by_reference(outside: Path) -> None:
    assert issubclass(suite_class("outside_suites:Mine"), Suite)
    for reference, message in [
        ("outside_suites:NotASuite", "not a subclass"),
        ("outside_suites:Absent", "cannot be imported"),
        ("no_such_module:Mine", "cannot be imported"),
        ("no_such_suite", "unknown; known: code"),
    ]:
        with pytest.raises(ValueError, match=message):
            suite_class(reference)


def test_a_suite_from_outside_by_entry_point(outside: Path) -> None:
    info = outside / "outside-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvgate.suites]\nmine = outside_suites:Mine\n")
    assert catalog()[0]["mine"].name == "mine"
    (info / "entry_points.txt").write_text("[kvgate.suites]\nretrieval = outside_suites:Mine\n")
    found, broken = catalog()
    assert found["retrieval"] is not suite_class("outside_suites:Mine")
    assert "claims a name that is taken" in broken["retrieval"]


@pytest.mark.parametrize(
    "code, says",
    [("raise SystemError('no licence')", "no licence"), ("import no_such_thing", "no_such_thing"), ("x = 1", "Mine")],
)
def test_a_broken_suite_of_another_package_breaks_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: str, says: str
) -> None:
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kvgate.suites]\nbroken = broken_suites:Mine\n")
    (tmp_path / "broken_suites.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "broken_suites", raising=False)
    assert suite_class("retrieval").name == "retrieval"
    with pytest.raises(ValueError, match=says):
        suite_class("broken")
    assert main(["suites"]) == 0
    said = capsys.readouterr()
    assert "retrieval: " in said.out
    assert says in said.err
    assert len(said.err.splitlines()) == 1


SCRIPT = """
from transformers import AutoTokenizer
from kvgate.evals.data.tokens import Tokens
from kvgate.evals.data.items import digest
from kvgate.evals.suites.base import BuildSpec
from kvgate.evals.suites.catalog import OWN
import sys
tokens = Tokens(AutoTokenizer.from_pretrained(sys.argv[1]))
print(digest([item.item_hash for suite in OWN for item in suite().build(tokens, BuildSpec(counts={512: 1}))]))
"""


@pytest.mark.slow
def test_same_bytes_in_another_process(chatml: Any, tmp_path: Path) -> None:
    chatml.save_pretrained(tmp_path)
    said = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tmp_path)],
            env={"PYTHONHASHSEED": seed, "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1
