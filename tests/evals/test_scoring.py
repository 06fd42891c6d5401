"""One normaliser, word boundaries, and nothing that ever leaves [0, 1]."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.evals.data.items import Exact, Listing, Overlap, Recall, Rule
from kvgate.evals.scoring.instruction_checks import CHECKS
from kvgate.evals.scoring.normaliser import first_line, normalise
from kvgate.evals.scoring.scores import score_answer, score_choice, score_exact

WORDS = st.text("abcdefgh", min_size=1, max_size=6)
NUMBERS = st.integers(0, 10**9)


def right(answer: str, *accept: str, match: str = "word") -> bool:
    return score_exact(answer, Exact(accept, match)) == 1.0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "answer, accept",
    [
        (" 1234567.", "1234567"),
        ("It is 1,234,567, I think", "1234567"),
        ("NEW YORK!", "new york"),
        ("\n\n  Paris\nLondon", "paris"),
        ("（Ｐａｒｉｓ）", "Paris"),
        ('"amber-lantern"', "amber-lantern"),
        ("fold_marker(x)", "fold_marker"),
        ("the value is \u22125", "-5"),
        ("x=3.14.", "3.14"),
        ("...", "..."),
    ],
)
def test_accepts(answer: str, accept: str) -> None:
    assert right(answer, accept)


@pytest.mark.parametrize(
    "answer, accept",
    [
        ("12345678", "1234567"),
        ("01234567", "1234567"),
        ("1234567a", "1234567"),
        ("1234567.5", "1234567"),
        ("-5", "5"),
        ("category", "cat"),
        ("fold_marker_2", "fold_marker"),
        ("new old york", "new york"),
        ("London\nParis", "Paris"),
        ("1,234,567,890", "1234567"),
        ("12,34,567", "1234567"),
        ("", "Paris"),
        ("", "..."),
    ],
)
def test_refuses(answer: str, accept: str) -> None:
    assert not right(answer, accept)


def test_first_wants_the_answer_at_the_start() -> None:
    assert right("42 or 43", "42", match="first")
    assert not right("43 or 42", "42", match="first")
    assert right("43 or 42", "42")


def test_any_accepted_answer_is_enough() -> None:
    assert right("the big apple", "New York", "Big Apple")


def test_first_line_skips_blank_lines() -> None:
    assert first_line("\n \n a b \n c") == "a b"
    assert first_line(" \n") == ""


@given(NUMBERS, NUMBERS)
def test_a_number_matches_only_itself(said: int, wanted: int) -> None:
    assert right(f"The answer is {said}.", str(wanted)) == (said == wanted)


@given(NUMBERS)
def test_digit_groups_change_nothing(value: int) -> None:
    assert normalise(f"{value:,}") == normalise(str(value))


@given(st.lists(WORDS, min_size=1, max_size=8), st.lists(WORDS, min_size=1, max_size=3))
def test_word_match_is_a_run_of_whole_words(said: list[str], wanted: list[str]) -> None:
    runs = [said[start : start + len(wanted)] for start in range(len(said))]
    assert right(" ".join(said), " ".join(wanted)) == (wanted in runs)


@given(st.text(max_size=60), st.text(max_size=20))
def test_never_raises_and_stays_binary(answer: str, accept: str) -> None:
    for match in ("word", "first"):
        assert score_exact(answer, Exact((accept,), match)) in (0.0, 1.0)  # type: ignore[arg-type]


@given(st.text(max_size=60))
def test_normalising_twice_changes_nothing(text: str) -> None:
    once = normalise(text)
    assert normalise(" ".join(once)) == once


def test_choice_wants_the_strictly_likeliest() -> None:
    assert score_choice([-1.0, -2.0], 0) == 1.0
    assert score_choice([-1.0, -2.0], 1) == 0.0
    assert score_choice([-1.0, -1.0], 0) == 0.0
    assert score_choice([math.nan, -1.0], 1) == 0.0
    assert score_choice([math.nan, math.nan], 0) == 0.0


def test_recall_is_a_share() -> None:
    recall = Recall(("12", "345", "New York"))
    assert score_answer("12, 3456\nnew york", recall) == pytest.approx(2 / 3)
    assert score_answer("", recall) == 0.0


def test_listing_wants_lines_at_their_places() -> None:
    listing = Listing(("1", "2", "3", "4"))
    assert score_answer("1\n\n2\n4\n4\n5", listing) == 0.75
    assert score_answer("", listing) == 0.0


@pytest.mark.parametrize(
    "rule, good, bad",
    [
        (Rule("contains", "amber"), "It is Amber.", "It is amberish."),
        (Rule("lacks", "amber"), "It is red.", "It is AMBER"),
        (Rule("starts", "Dear Nora"), "dear nora, hello", "hello dear nora"),
        (Rule("ends", "Over and out"), "Yes. Over and out!", "Over and out? Yes"),
        (Rule("upper"), "YES, 3 OF THEM", "YES, three"),
        (Rule("lower"), "yes, 3", "Yes"),
        (Rule("digits"), "1 2 3", "1, two"),
        (Rule("bullets"), "- a\n- b", "- a\nb"),
        (Rule("max_words", "3"), "one two three", "one two three four"),
        (Rule("language", "fr"), "le chat est dans la maison", "the cat is in the house"),
        (Rule("language", "en"), "the cat is in the house", "el gato es de la casa"),
    ],
)
def test_rules(rule: Rule, good: str, bad: str) -> None:
    assert score_answer(good, rule) == 1.0
    assert score_answer(bad, rule) == 0.0


@pytest.mark.parametrize("check", list(CHECKS))
def test_silence_obeys_nothing(check: str) -> None:
    value = {"max_words": "3", "language": "en"}.get(check, "amber")
    assert score_answer(" \n", Rule(check, value)) == 0.0  # type: ignore[arg-type]


def test_a_rule_without_its_value_is_refused() -> None:
    with pytest.raises(ValueError, match="max_words"):
        score_answer("a b", Rule("max_words", "many"))
    with pytest.raises(ValueError, match="language 'xx'"):
        score_answer("a b", Rule("language", "xx"))


def test_f1_is_of_bags_of_words() -> None:
    assert score_answer("the cat sat", Overlap(("The cat sat!", "dog"))) == 1.0
    assert score_answer("the cat", Overlap(("the dog",))) == 0.5
    assert score_answer("", Overlap(("the dog",))) == 0.0


def test_edit_similarity_of_first_lines() -> None:
    assert score_answer("kitten\nmore", Overlap(("sitting",), "edit")) == pytest.approx(1 - 3 / 7)
    assert score_answer("  return x\n", Overlap(("return x",), "edit")) == 1.0
    assert score_answer("", Overlap(("return x",), "edit")) == 0.0


@given(st.text(max_size=20), st.text(max_size=20))
def test_overlap_stays_in_bounds_and_is_symmetric(one: str, other: str) -> None:
    for measure in ("f1", "edit"):
        score = score_answer(one, Overlap((other,), measure))  # type: ignore[arg-type]
        assert 0.0 <= score <= 1.0
        assert score == score_answer(other, Overlap((one,), measure))  # type: ignore[arg-type]
