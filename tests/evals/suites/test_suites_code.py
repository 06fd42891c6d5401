"""Code from the standard library, a folder or a package; names that nobody memorised."""

import ast
from pathlib import Path
from typing import Any

import pytest

from kvgate.evals.data.corpus import library_root
from kvgate.evals.data.items import Choice
from kvgate.evals.data.tokens import Tokens
from kvgate.evals.suites.base import BuildSpec
from kvgate.evals.suites.code.suite import Code

CODE = "\n\n".join(f"def step_{n}(value):\n    # number {n}\n    return value + {n}" for n in range(400))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(CODE)
    (tmp_path / "broken.py").write_text("def (" * 3000)
    return tmp_path


def test_a_folder_of_the_users(tokens: Tokens, chatml: Any, folder: Path) -> None:
    items = Code().build(
        tokens, BuildSpec(counts={512: 3}, tasks=("constant", "imports"), options={"folder": str(folder)})
    )
    assert {item.cluster for item in items} <= {"one.py", "two.py"}
    assert str(folder) not in str(items)  # no path of this machine in a record
    for item in items:
        assert "# number" in chatml.decode(item.context)
        assert "step_" not in chatml.decode(item.context)  # renamed


def test_a_package_of_the_users(tokens: Tokens) -> None:
    (item,) = Code().build(tokens, BuildSpec(counts={512: 1}, tasks=("label",), options={"package": "json"}))
    assert item.cluster in {path.name for path in (library_root() / "json").iterdir()}
    assert item.meta["source"] == "json"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"folder": "/no/such/folder"}, "not a folder"),
        ({"package": "no_such_package"}, "not installed"),
        ({"package": "this"}, "single module"),
        ({"package": "json", "folder": "."}, "exclude each other"),
    ],
)
def test_bad_sources_are_refused(tokens: Tokens, options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Code().build(tokens, BuildSpec(counts={512: 1}, options=options))


def test_a_folder_without_code_is_refused(tokens: Tokens, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no \.py files"):
        Code().build(tokens, BuildSpec(counts={512: 1}, options={"folder": str(tmp_path)}))
    (tmp_path / "short.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match="ask for less"):
        Code().build(tokens, BuildSpec(counts={512: 1}, options={"folder": str(tmp_path)}))


def test_imports_name_the_module_that_has_the_constant(tokens: Tokens, chatml: Any) -> None:
    for item in Code().build(tokens, BuildSpec(counts={1024: 4}, tasks=("imports",))):
        context, prompt = chatml.decode(item.context), chatml.decode(item.turns[0].prompt)
        for line in prompt.splitlines():
            if line.startswith("assert "):
                module, _, constant = line.removeprefix("assert ").split(" ==")[0].partition(".")
                before = context[: context.index(f"\n{constant} = ")]
                headers = [part for part in before.split("\n# ") if ".py\n" in part]
                assert headers[-1].startswith(f"{module}.py")


def test_the_completed_name_is_out_of_reach(tokens: Tokens, chatml: Any) -> None:
    """The identifier stands in the context, not in its last quarter, and the distractors stand nowhere."""
    for item in Code().build(tokens, BuildSpec(counts={1024: 4}, tasks=("completion",))):
        choice = item.turns[0].scoring
        assert isinstance(choice, Choice)
        names = [chatml.decode(candidate).strip() for candidate in choice.candidates]
        near = chatml.decode(item.context[-item.length // 4 :] + item.turns[0].prompt)
        far = chatml.decode(item.context)
        assert names[choice.gold] == item.meta["gold"]
        assert names[choice.gold] in far
        assert names[choice.gold] not in near
        assert not any(name in far for rank, name in enumerate(names) if rank != choice.gold)


def test_definitions_stand_between_statements(tokens: Tokens, chatml: Any) -> None:
    """What follows the cut first statement is valid Python, definitions included."""
    for item in Code().build(tokens, BuildSpec(counts={1024: 3}, tasks=("constant", "label", "signature"))):
        start = item.facts[0][0]
        ast.parse(chatml.decode(item.context[start:]))
