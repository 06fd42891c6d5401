"""The house of docs/ARCHITECTURE.md: six rooms at the top level, importable only as kvgate.<room>."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import kvgate

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("compressors", "engine", "evals", "kernels", "lifecycle", "serving")


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def test_no_init_file_where_it_would_shadow_other_packages() -> None:
    """transformers probes ``import kernels``: a folder of that name with an ``__init__.py`` breaks its Llama."""
    found = [ROOT / room / "__init__.py" for room in (*ROOMS, "configs")]
    found += (ROOT / "tests").rglob("__init__.py")
    assert [str(path.relative_to(ROOT)) for path in found if path.exists()] == []


@pytest.mark.parametrize("room", [*ROOMS, "configs"])
def test_each_room_is_one_link(room: str) -> None:
    link = ROOT / "src" / "kvgate" / room
    assert link.is_symlink()
    assert link.readlink() == Path("..", "..", room), "relative, so that a clone anywhere works"
    assert link.resolve() == ROOT / room


def test_nothing_else_lives_in_the_package_folder() -> None:
    found = {path.name for path in (ROOT / "src" / "kvgate").iterdir()} - {"__pycache__"}
    assert found == {
        "__init__.py",
        "__main__.py",
        "cli",
        "api.py",
        "strict_yaml.py",
        "typed.py",
        "py.typed",
        "configs",
        *ROOMS,
    }


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_as_kvgate_rooms_and_come_from_here(room: str) -> None:
    path = sources(room)[0]
    module = importlib.import_module(".".join(("kvgate", *path.relative_to(ROOT).with_suffix("").parts)))
    assert module.__file__ is not None
    assert Path(module.__file__).resolve() == path
    assert kvgate.__file__ is not None


def test_imports_are_absolute_and_name_the_package() -> None:
    wrong = []
    for path in sources(*ROOMS, "src/kvgate", "tests", "benchmarks"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
                if node.level:
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} relative import")
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            wrong += [
                f"{path.relative_to(ROOT)}:{node.lineno} imports {name}"
                for name in names
                if name.partition(".")[0] in ROOMS
            ]
    assert wrong == []


def test_floors_hold_in_the_sources() -> None:
    """What import-linter checks in `make lint`, so that `make test` alone sees it too."""
    below = {"engine": {"compressors", "kernels", "lifecycle"}, "evals": set(ROOMS) - {"evals", "serving"}}
    below["serving"] = set(ROOMS)
    wrong = []
    for room in ROOMS:
        allowed = {room, *below.get(room, set())}
        for path in sources(room):
            for node in ast.walk(ast.parse(path.read_text())):
                module = node.module if isinstance(node, ast.ImportFrom) else None
                parts = (module or "").split(".")
                if parts[0] == "kvgate" and len(parts) > 1 and parts[1] in ROOMS and parts[1] not in allowed:
                    wrong.append(f"{path.relative_to(ROOT)} imports {module}")
                if room == "lifecycle" and parts[0] in ("torch", "triton", "transformers"):
                    wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert wrong == []


def test_tests_mirror_the_rooms_and_each_file_name_stands_once_in_a_room() -> None:
    """A failing test is found by its name alone, and what a folder tests by its path."""
    names: dict[tuple[str, str], list[str]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        place = path.relative_to(ROOT / "tests")
        if len(place.parts) > 1:
            tested = ROOT / ("src/kvgate" if place.parts[0] == "cli" else "") / place.parent
            assert tested.is_dir(), f"{place}: there is no room {place.parent}"
            names.setdefault((place.parts[0], place.name), []).append(str(place))
    assert len(names) > len(ROOMS), "nothing was looked at"
    assert [places for places in names.values() if len(places) > 1] == []


def test_nothing_cites_a_file_that_a_clone_does_not_have() -> None:
    cited = "design" + ".md"
    texts = [*sources(*ROOMS, "src/kvgate", "tests", "benchmarks"), *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    assert [str(path.relative_to(ROOT)) for path in texts if cited in path.read_text("utf-8")] == []


@pytest.mark.slow
def test_transformers_imports_with_the_repository_root_on_the_path() -> None:
    """In a process of its own, started in the root as users start it."""
    script = (
        "import sys; sys.path.insert(0, '.')\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "import kvgate.kernels.ops, kvgate.engine.engine\n"
        "import importlib.util\n"
        "spec = importlib.util.find_spec('kernels')\n"
        "assert spec is None or spec.origin is None, 'our folder must be no regular package'\n"
        "config = LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, "
        "num_attention_heads=2)\n"
        "LlamaForCausalLM(config)\n"
        "print('imported')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip().endswith("imported"), done.stderr[-2000:]


@pytest.mark.slow
def test_lifecycle_brings_no_torch() -> None:
    script = (
        "import sys, kvgate.lifecycle.tables, kvgate.lifecycle.manager, kvgate.lifecycle.lab.simulator\n"
        "print([name for name in ('torch', 'triton', 'transformers') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr[-2000:]
