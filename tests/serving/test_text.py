"""Texts as they come: whole characters, cut before stop texts, whatever the pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvgate.engine.models import LoadedModel
from kvgate.serving.text import Detokenizer, Pieces, StopTexts


def test_characters_come_out_whole_and_nothing_is_lost(tiny: LoadedModel) -> None:
    text = "naïve → 日本 🎉 end"
    detokenizer = Detokenizer(tiny.tokenizer)
    pieces = [detokenizer.push(token) for token in tiny.tokenizer.encode(text)]
    assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces)
    assert "🎉" in pieces


def test_what_is_broken_at_the_end_is_shown_as_such(tiny: LoadedModel) -> None:
    detokenizer = Detokenizer(tiny.tokenizer)
    ids = tiny.tokenizer.encode("a🎉")[:-1]
    assert "".join(detokenizer.push(token) for token in ids) == "a"
    assert detokenizer.flush() == "�"
    assert detokenizer.flush() == ""


letters = st.text("ab", max_size=12)


@given(st.lists(letters, max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_a_stream_is_cut_where_the_whole_text_would_be(pieces: list[str], stops: list[str]) -> None:
    cut = StopTexts(tuple(stops))
    out = "".join([*map(cut.push, pieces)]) + ("" if cut.stopped else cut.flush())
    whole = "".join(pieces)
    # A stop text that is complete ends the answer at once, so of several the one that is complete first counts.
    ends = sorted((whole.find(s) + len(s), whole.find(s)) for s in stops if s in whole)
    assert cut.stopped == bool(ends)
    if not ends:
        assert out == whole
    else:
        assert not any(stop in out for stop in stops)
        assert whole.startswith(out)


def test_tokens_that_are_no_characters_are_told_apart(tiny: LoadedModel) -> None:
    pieces = Pieces(tiny.tokenizer)
    ids = tiny.tokenizer.encode("🎉é ")
    assert b"".join(map(pieces.bytes_of, ids)) == "🎉é ".encode()
    assert len({pieces.text_of(token) for token in ids[:4]}) == 4
    assert pieces.text_of(ids[0]) == "bytes:\\xf0"
    assert pieces.text_of(ids[-1]) == " "
    assert pieces.text_of(tiny.tokenizer.eos_token_id) == "<eos>"
