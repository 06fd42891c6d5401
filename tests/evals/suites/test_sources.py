"""Filler and needles: exact lengths, whole needles, nearest borders; text and files that are really there."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.evals.data.corpus import lay, library_files, parse, passages, prose, python_files
from kvgate.evals.data.items import Ids
from kvgate.evals.data.tokens import Tokens

PIECES = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=12).map(tuple), min_size=1, max_size=20)
NEEDLES = st.lists(
    st.tuples(st.floats(0, 1), st.lists(st.integers(100, 109), min_size=1, max_size=6).map(tuple)), max_size=4
)


@given(PIECES, NEEDLES, st.data())
def test_lay_fills_exactly_and_cuts_no_needle(
    pieces: list[Ids], needles: list[tuple[float, Ids]], data: st.DataObject
) -> None:
    filler = sum(map(len, pieces))
    length = sum(len(ids) for _, ids in needles)
    room = length + data.draw(st.integers(0, filler))
    laid = lay(pieces, needles, room)
    assert len(laid.ids) == room
    for (_, ids), (start, end) in zip(needles, laid.spans, strict=True):
        assert laid.ids[start:end] == ids
    inside = {place for start, end in laid.spans for place in range(start, end)}
    kept = [token for place, token in enumerate(laid.ids) if place not in inside]
    whole = [token for piece in pieces for token in piece]
    assert kept == whole[len(whole) - len(kept) :]


def test_lay_uses_the_nearest_border_and_keeps_the_order() -> None:
    pieces = [(1,) * 10, (2,) * 10, (3,) * 10]
    laid = lay(pieces, [(0.4, (7,)), (0.3, (8,)), (1.0, (9,))], 33)
    assert laid.ids == (1,) * 10 + (7, 8) + (2,) * 10 + (3,) * 10 + (9,)
    assert laid.spans == ((10, 11), (11, 12), (32, 33))


def test_lay_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="need 4 tokens and the context has room for 3"):
        lay([(1, 2)], [(0.5, (7, 7, 7, 7))], 3)
    with pytest.raises(ValueError, match="8 tokens of filler are missing"):
        lay([(1, 2)], [], 10)


def test_prose_is_enough_and_differs(tokens: Tokens) -> None:
    one, other = (prose(tokens, random.Random(seed), 500) for seed in ("1", "2"))
    assert sum(map(len, one)) >= 500
    assert one[:3] != other[:3]
    assert prose(tokens, random.Random("1"), 500) == one
    assert sum(map(len, prose(tokens, random.Random("3"), 100_000))) >= 100_000  # more than there are passages


def test_passages_are_prose() -> None:
    found = passages()
    assert len(found) > 40
    for passage in found:
        for paragraph in passage.paragraphs:
            text = " ".join(paragraph)
            assert text[0].isupper()
            assert text.endswith(".")
            assert "\n" not in text


def test_library_files_are_hand_written_code() -> None:
    names = {path.name for path in library_files()}
    assert {"textwrap.py", "argparse.py"} <= names
    assert not any("test" in path.parts for path in library_files())
    assert sorted(library_files()) == list(library_files())


def test_unreadable_files_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def (")
    (tmp_path / "latin.py").write_bytes(b"x = '\xe9'")
    (tmp_path / "good.py").write_text("x = 1")
    assert [parse(path) is not None for path in python_files(tmp_path)] == [False, True, False]
