"""Instructions that can be checked without a reference answer, after IFEval (Zhou et al. 2023, arXiv:2311.07911).

An empty answer obeys nothing: a policy that falls silent must not pass for obedient.
"""

from __future__ import annotations

from collections.abc import Callable

from kvgate.evals.data.items import Rule
from kvgate.evals.scoring.normaliser import has_run, normalise

# Commonest function words; enough to tell which of these languages a sentence is in.
FUNCTION_WORDS = {
    "de": "der die das und ist nicht ein eine zu den mit von auf für im ich wir es",
    "en": "the of and to in is that it for was on are with as be this you",
    "es": "el la los las de que y en un una es por con para no se del lo",
    "fr": "le la les de des et un une est que dans pour pas sur ce il du au",
}


def obeys(text: str, rule: Rule) -> bool:
    """Whether the answer follows the rule. ValueError for a rule whose value makes no sense."""
    said = normalise(text)
    return bool(said) and CHECKS[rule.check](text, said, rule.value)


Words = tuple[str, ...]


def _contains(text: str, said: Words, value: str) -> bool:
    return has_run(said, normalise(value))


def _lacks(text: str, said: Words, value: str) -> bool:
    return not _contains(text, said, value)


def _starts(text: str, said: Words, value: str) -> bool:
    wanted = normalise(value)
    return said[: len(wanted)] == wanted


def _ends(text: str, said: Words, value: str) -> bool:
    wanted = normalise(value)
    return said[len(said) - len(wanted) :] == wanted


def _upper(text: str, said: Words, value: str) -> bool:
    return text.isupper()


def _lower(text: str, said: Words, value: str) -> bool:
    return text.islower()


def _digits(text: str, said: Words, value: str) -> bool:
    return all(word.isdigit() for word in said)


def _bullets(text: str, said: Words, value: str) -> bool:
    return all(line.lstrip().startswith(("- ", "* ")) for line in text.splitlines() if line.strip())


def _max_words(text: str, said: Words, value: str) -> bool:
    if not value.isdigit():
        raise ValueError(f"rule max_words {value!r} is not a number; give a number of words")
    return len(said) <= int(value)


def _language(text: str, said: Words, value: str) -> bool:
    if value not in FUNCTION_WORDS:
        raise ValueError(f"rule language {value!r} is unknown; known: {', '.join(FUNCTION_WORDS)}")
    found = {code: sum(word in known.split() for word in said) for code, known in FUNCTION_WORDS.items()}
    return all(found[value] > count for code, count in found.items() if code != value)


CHECKS: dict[str, Callable[[str, Words, str], bool]] = {
    "contains": _contains,
    "lacks": _lacks,
    "starts": _starts,
    "ends": _ends,
    "upper": _upper,
    "lower": _lower,
    "digits": _digits,
    "bullets": _bullets,
    "max_words": _max_words,
    "language": _language,
}
