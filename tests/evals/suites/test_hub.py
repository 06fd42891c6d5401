"""Hub data from local copies of the same layout, and polite refusals."""

import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from kvgate.evals.data.items import Choice, Exact, Item, Overlap, Recall
from kvgate.evals.data.tokens import Tokens
from kvgate.evals.scoring.scores import score_answer
from kvgate.evals.suites.base import BuildSpec
from kvgate.evals.suites.catalog import HUB, catalog
from kvgate.evals.suites.hub.base import HubSuite, pinned
from kvgate.evals.suites.hub.longbench import HubLongBench
from kvgate.evals.suites.hub.longbench2 import HubLongBench2
from kvgate.evals.suites.hub.longmemeval import HubLongMemEval
from kvgate.evals.suites.hub.repobench import HubRepoBench
from kvgate.evals.suites.hub.ruler import HubRuler
from kvgate.evals.suites.hub.scbench import HubSCBench

TEXT = "The quick brown fox jumps over the lazy dog. " * 20

RULER = {
    "context": TEXT + "The special number is 4711.",
    "question": "What is the special number?",
    "answer_prefix": "The special number is ",
    "answer": ["4711"],
    "task": "niah_single_1",
    "max_new_tokens": 128,
}
LONGBENCH = {"input": "Who jumps?", "context": TEXT, "answers": ["the fox", "a brown fox"], "_id": "x1", "length": 180}
CODE = {"input": "", "context": "import os\n" * 60, "answers": ["return os.sep"], "_id": "x2", "length": 60}
LONGBENCH2 = {
    "_id": "y1",
    "domain": "Code",
    "difficulty": "easy",
    "question": "Which animal is lazy?",
    "choice_A": "fox",
    "choice_B": "dog",
    "choice_C": "cat",
    "choice_D": "bee",
    "answer": "B",
    "context": TEXT,
}
SCBENCH = {
    "id": 3,
    "context": TEXT,
    "multi_turns": [{"input": "Key a?", "answer": "1234"}, {"input": "Key b?", "answer": ["5678", "56 78"]}],
}
NUMBERS = {"id": 4, "context": [3, 17, 5], "multi_turns": [{"input": "The largest number is:", "answer": 17}]}
TRACE = {"id": 5, "input": TEXT, "multi_turns": [{"input": "Which variables are 7?", "answer": ["AB", "CD"]}]}
REPOBENCH = {
    "repo_name": "me/mine",
    "file_path": "a/b.py",
    "context": [{"identifier": "Box", "path": "a/box.py", "snippet": "class Box:\n    pass\n" * 20}],
    "import_statement": "from a.box import Box",
    "cropped_code": "def make():\n    x = 1",
    "all_code": "",
    "next_line": "    return Box()",
    "gold_snippet_index": 0,
    "created_at": "2023-11-01",
    "level": "2k",
    "token_num": 100,
}
LONGMEMEVAL = {
    "question_id": "q1",
    "question_type": "single-session-user",
    "question": "What is my dog's name?",
    "answer": 7,
    "question_date": "2023/05/30 (Tue) 23:40",
    "haystack_session_ids": ["answer_2", "answer_1"],
    "haystack_dates": ["2023/05/29 (Mon) 10:00", "2023/05/20 (Sat) 02:21"],
    "haystack_sessions": [
        [{"role": "user", "content": "My dog is 7."}, {"role": "user", "content": "And old."}],
        [{"role": "user", "content": TEXT}, {"role": "assistant", "content": "I see.", "has_answer": True}],
    ],
    "answer_session_ids": ["answer_2"],
}


def jsonl(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """One folder with every data set's files, laid out as in their repositories."""
    for folder in ("4096", "data"):
        (tmp_path / folder).mkdir()
    Dataset.from_list([RULER, RULER]).to_parquet(tmp_path / "4096" / "test-00000-of-00001.parquet")
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        for task in HubLongBench.tasks:
            archive.writestr(f"data/{task}.jsonl", jsonl(CODE if task in ("lcc", "repobench-p") else LONGBENCH))
    (tmp_path / "data.json").write_text(json.dumps([LONGBENCH2, {**LONGBENCH2, "context": TEXT * 99}]))
    for task, row in {"kv": SCBENCH, "qa_eng": SCBENCH, "mf": NUMBERS, "vt": TRACE}.items():
        (tmp_path / "data" / f"scbench_{task}.jsonl").write_text(jsonl(row))
    for split in HubRepoBench.tasks:
        for shard in ("00000-of-00002-baebda7f3a6e980a", "00001-of-00002-5780ed62c5162a3e"):
            Dataset.from_list([REPOBENCH]).to_parquet(tmp_path / "data" / f"{split}-{shard}.parquet")
    abstention = {**LONGMEMEVAL, "question_id": "q1_abs", "answer": "You did not say."}
    judged = {**LONGMEMEVAL, "question_type": "single-session-preference"}
    (tmp_path / "longmemeval_oracle.json").write_text(json.dumps([abstention, judged, LONGMEMEVAL]))
    return tmp_path


def build(suite: HubSuite, tokens: Tokens, local: Path, task: str, count: int = 1, length: int = 2048) -> list[Item]:
    return suite.build(tokens, BuildSpec(counts={length: count}, tasks=(task,), options={"path": str(local)}))


def test_ruler(tokens: Tokens, chatml: Any, local: Path) -> None:
    first, second = build(HubRuler(), tokens, local, "4096", 2)
    assert first.task == "niah_single_1"
    assert first.turns[0].scoring == Recall(("4711",))
    assert chatml.decode(first.turns[0].prompt).endswith("The special number is")
    assert "What is" not in chatml.decode(first.context)
    assert (first.cluster, first.index, second.index) == (second.cluster, 0, 1)
    assert first.meta["source"] == "simonjegou/ruler"
    assert first.meta["revision"] == "local copy"


@pytest.mark.parametrize("task", list(HubLongBench.tasks))
def test_longbench(tokens: Tokens, local: Path, task: str) -> None:
    (item,) = build(HubLongBench(), tokens, local, task)
    scoring = item.turns[0].scoring
    assert isinstance(scoring, Exact | Overlap)
    assert score_answer(scoring.accept[0], scoring) == 1.0


def test_longbench_from_an_unpacked_archive(tokens: Tokens, local: Path) -> None:
    with zipfile.ZipFile(local / "data.zip") as archive:
        archive.extractall(local)
    (local / "data.zip").unlink()
    assert len(build(HubLongBench(), tokens, local, "hotpotqa")) == 1


def test_longbench2(tokens: Tokens, chatml: Any, local: Path) -> None:
    (item,) = build(HubLongBench2(), tokens, local, "all")  # the second row is too long, and is passed over
    choice = item.turns[0].scoring
    assert isinstance(choice, Choice)
    assert [chatml.decode(ids) for ids in choice.candidates] == ["A", "B", "C", "D"]
    assert choice.gold == 1
    assert item.task == "Code"


def test_scbench(tokens: Tokens, local: Path) -> None:
    (item,) = build(HubSCBench(), tokens, local, "kv")
    assert item.protocol == "multi_turn"
    assert [turn.scoring for turn in item.turns] == [Exact(("1234",)), Exact(("5678", "56 78"))]
    (graded,) = build(HubSCBench(), tokens, local, "qa_eng")
    assert isinstance(graded.turns[0].scoring, Overlap)
    assert (
        item.turns[0].max_new_tokens > graded.turns[0].max_new_tokens
    )  # a random string takes more tokens than a name


def test_scbench_contexts_that_are_numbers_or_called_input(tokens: Tokens, chatml: Any, local: Path) -> None:
    (numbers,) = build(HubSCBench(), tokens, local, "mf")
    assert chatml.decode(numbers.context).endswith("[3, 17, 5]")
    assert numbers.turns[0].scoring == Exact(("17",))
    (trace,) = build(HubSCBench(), tokens, local, "vt")
    assert TEXT.strip() in chatml.decode(trace.context)
    assert trace.turns[0].scoring == Recall(("AB", "CD"))  # all of the names are asked for


def test_repobench(tokens: Tokens, chatml: Any, local: Path) -> None:
    item, _ = build(HubRepoBench(), tokens, local, "in_file", 2)  # one row from each shard
    whole = chatml.decode(item.context + item.turns[0].prompt)
    assert whole.startswith("# Path: a/box.py\nclass Box:")
    assert whole.endswith("def make():\n    x = 1\n")


def test_longmemeval(tokens: Tokens, chatml: Any, local: Path) -> None:
    (item,) = build(HubLongMemEval(), tokens, local, "oracle")  # abstention and judged questions are passed over
    text = chatml.decode(item.context + item.turns[0].prompt)
    assert text.count("<|im_start|>user") == 3
    assert "[2023/05/29 (Mon) 10:00]\nMy dog is 7.\n\nAnd old.<|im_end|>" in text
    assert text.index("[2023/05/20 (Sat) 02:21]\nThe quick") < text.index("My dog is 7.")  # by date, not as listed
    assert item.turns[0].scoring == Overlap(("7",))
    assert item.meta["id"] == "q1"


def test_longmemeval_sessions_without_dates_are_refused(tokens: Tokens) -> None:
    with pytest.raises(ValueError, match="'haystack_dates' has 1 entries for 2 sessions"):
        HubLongMemEval().item(tokens, "oracle", {**LONGMEMEVAL, "haystack_dates": ["2023/05/20 (Sat) 02:21"]})


@pytest.mark.parametrize("suite", HUB)
def test_every_data_set_states_where_it_comes_from(suite: type[HubSuite]) -> None:
    assert suite.name in catalog()[0]
    assert suite.source.repo in suite.origin()
    assert suite.source.licence in suite.origin()
    assert set(suite.source.files) == set(suite.tasks)
    assert pinned(suite.source, "") == suite.source.revision
    with pytest.raises(ValueError, match="no revision is known"):
        pinned(replace(suite.source, revision=None), "")
    with pytest.raises(ValueError, match="not a full commit hash"):
        pinned(suite.source, "main")


def test_the_hub_out_of_reach_is_one_clear_line(tokens: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match=r"the hub cannot be reached.*give option path"):
        HubLongBench2().build(tokens, BuildSpec(counts={2048: 1}))
    with pytest.raises(ValueError, match="the hub cannot be reached"):
        HubRuler().build(tokens, BuildSpec(counts={2048: 1}, options={"revision": "0" * 40}))


@pytest.mark.parametrize("missing", ["context", "question", "answer", "answer_prefix", "task", "max_new_tokens"])
def test_a_missing_field_is_named(tokens: Tokens, missing: str) -> None:
    row = {name: value for name, value in RULER.items() if name != missing}
    with pytest.raises(ValueError, match=f"field '{missing}' is missing"):
        HubRuler().item(tokens, "4096", row)


def test_a_missing_field_says_which_row(tokens: Tokens, local: Path) -> None:
    bad = {**SCBENCH, "multi_turns": [{"input": "Key a?"}]}
    (local / "data" / "scbench_kv.jsonl").write_text(jsonl(SCBENCH, bad))
    with pytest.raises(ValueError, match="scbench: kv row 1: field 'answer' is missing"):
        build(HubSCBench(), tokens, local, "kv", 2)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"answer": "E"}, "expected one of A, B, C, D"),
        ({"context": 3}, "field 'context' is int"),
        ({"choice_C": None}, "field 'choice_C' is missing"),
    ],
)
def test_ill_typed_fields_are_named(tokens: Tokens, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HubLongBench2().item(tokens, "all", {**LONGBENCH2, **change})


def test_empty_answers_and_turns_are_refused(tokens: Tokens) -> None:
    with pytest.raises(ValueError, match="'answers' is empty"):
        HubLongBench().item(tokens, "hotpotqa", {**LONGBENCH, "answers": []})
    with pytest.raises(ValueError, match="'multi_turns' is empty"):
        HubSCBench().item(tokens, "kv", {**SCBENCH, "multi_turns": []})


def test_corrupt_files_are_named(tokens: Tokens, local: Path) -> None:
    (local / "data.json").write_text('[{"context": ')
    with pytest.raises(ValueError, match=r"data\.json cannot be read"):
        build(HubLongBench2(), tokens, local, "all")
    (local / "data" / "scbench_kv.jsonl").write_text("[1, 2]")
    with pytest.raises(ValueError, match="a row is not an object"):
        build(HubSCBench(), tokens, local, "kv")
    (local / "data.zip").write_bytes(b"not a zip")
    with pytest.raises(ValueError, match=r"data\.zip cannot be read"):
        build(HubLongBench(), tokens, local, "lcc")


def test_an_empty_folder_and_too_few_rows_are_refused(tokens: Tokens, local: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match=r"has no data\.json"):
        build(HubLongBench2(), tokens, empty, "all")
    with pytest.raises(ValueError, match="has 1 rows of up to 2048 tokens, 2 were asked for"):
        build(HubLongBench2(), tokens, local, "all", 2)


def test_rows_go_to_the_smallest_length_that_holds_them(tokens: Tokens, local: Path) -> None:
    items = HubLongBench2().build(tokens, BuildSpec(counts={1024: 1, 65536: 1}, options={"path": str(local)}))
    assert [item.length for item in items] == [1024, 65536]
    assert all(item.longest <= item.length for item in items)
    assert HubLongBench2().build(tokens, BuildSpec(counts={1024: 0}, options={"path": str(local)})) == []
