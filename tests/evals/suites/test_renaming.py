"""Renaming changes names and nothing else."""

import ast
import random
import subprocess
import sys
from pathlib import Path

import pytest

from kvgate.evals.data.corpus import library_files
from kvgate.evals.suites.code.renaming import in_style, rename, styled

SOURCE = """
import os as operating
__version__ = "1"
LIMIT = 3
_SIZES = [LIMIT, 4]
counted = 0
shadowed = 1
in_string = 2

class Reader(Base):
    limit = LIMIT
    def helper(self, shadowed):
        global counted
        counted += 1
        return self.LIMIT + shadowed + helper(LIMIT=LIMIT)

def helper(value=LIMIT):
    return f"{in_string}" + Reader(value).LIMIT

async def waiting():
    "LIMIT in a string stays."
    return [helper(x) for x in _SIZES]
"""


def test_only_safe_names_change() -> None:
    renamed = rename(SOURCE, random.Random("1"))
    # LIMIT is a keyword argument too, helper a method, counted global, shadowed an argument.
    assert {"_SIZES", "Reader", "waiting"} <= set(renamed.names)
    assert not {"LIMIT", "helper", "counted", "shadowed", "__version__", "operating"} & set(renamed.names)
    assert "LIMIT in a string stays." in renamed.source
    for old, new in renamed.names.items():
        assert old.isupper() == new.isupper()
        assert old.startswith("_") == new.startswith("_")
        assert new not in SOURCE


def test_the_renamed_code_does_the_same(tmp_path: Path) -> None:
    source = (
        "START = 4\ndef double(x):\n    return 2 * x\nclass Box:\n    def open(self):\n        return double(START)\n"
        "print(Box().open())\n"
    )
    renamed = rename(source, random.Random("2"))
    assert set(renamed.names) == {"START", "double", "Box"}
    script = tmp_path / "renamed.py"
    script.write_text(renamed.source)
    assert subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout == "8\n"


def test_back_again_is_the_original() -> None:
    """The inverse renaming, done by a plain text replacement, gives the original file for the standard library."""
    for path in library_files()[::40]:
        source = path.read_text("utf-8")
        renamed = rename(source, random.Random(path.name))
        back = renamed.source
        for old, new in renamed.names.items():
            assert new not in source
            back = back.replace(new, old)
        assert back == source


def test_unreadable_source_is_refused() -> None:
    with pytest.raises(SyntaxError):
        rename("def (", random.Random("3"))


@pytest.mark.parametrize(
    "like, made",
    [("LIMIT", "WARM_APPLE"), ("_Reader", "_WarmApple"), ("read_it", "warm_apple"), ("__x", "__warm_apple")],
)
def test_styles(like: str, made: str) -> None:
    assert styled(("warm", "apple"), like) == made
    assert in_style(like, random.Random("4")).startswith(like[: len(like) - len(like.lstrip("_"))])


def test_every_name_is_an_identifier() -> None:
    for seed in range(50):
        name = in_style("x", random.Random(str(seed)))
        assert name.isidentifier()
        ast.parse(f"{name} = 1")
