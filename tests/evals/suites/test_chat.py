"""The template is cut into ids once, and putting the pieces together gives what the template gives."""

import copy
from typing import Any

import pytest
from tokenizers import processors

from kvgate.evals.data.tokens import Tokens

LLAMA = (
    "{{ bos_token }}{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}"
    "{% else %}{% set system = '' %}{% endif %}[system]Today: {{ date_string }}\n{{ system }}\n"
    "{% for m in messages %}{{ '[' + m.role + ']\n' + m.content | trim + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}"
    "{% endif %}{{ '<turn>' + m.role + '\n' + m.content + '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"
)
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)


def templated(plain: Any, template: str) -> Any:
    tokenizer = copy.deepcopy(plain)
    tokenizer.chat_template = template
    return tokenizer


def talk(system: bool) -> list[dict[str, str]]:
    turns = [("user", "Hello there"), ("assistant", "Noted."), ("user", "What now?")]
    return [{"role": role, "content": text} for role, text in ([("system", "Be brief")] if system else []) + turns]


@pytest.mark.parametrize("template", ["chatml", LLAMA, GEMMA, THINKING])
@pytest.mark.parametrize("system", [False, True])
def test_pieces_make_the_whole(plain: Any, chatml: Any, template: str, system: bool) -> None:
    tokenizer = chatml if template == "chatml" else templated(plain, template)
    tokens = Tokens(tokenizer)
    chat = tokens.chat
    made = tokens.join(
        chat.start(tokens.encode("Be brief") if system else None),
        "Hello there",
        chat.scripted,
        "Noted.",
        chat.next_user,
        "What now?",
        chat.speak,
    )
    if system and template == GEMMA:  # knows no system role: the text goes before the first user text
        messages = talk(False)
        messages[0]["content"] = "Be brief\n\nHello there"
    else:
        messages = talk(system)
    whole = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, date_string="26 Jul 2024", enable_thinking=False
    )
    assert tokenizer.decode(made) == whole
    assert list(made) == tokenizer.encode(whole, add_special_tokens=False)


def test_plain_tokenizer_gets_lines(plain: Any) -> None:
    tokens = Tokens(plain)
    assert not tokens.chat.templated
    text = plain.decode(tokens.join(tokens.chat.start(), "Hi", tokens.chat.speak))
    assert text == "User: Hi\nAssistant:"


@pytest.fixture
def adds_bos(plain: Any) -> Any:
    tokenizer = copy.deepcopy(plain)
    bos = tokenizer.convert_tokens_to_ids("<s>")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    return tokenizer


def test_bos_once(adds_bos: Any) -> None:
    bos = adds_bos.convert_tokens_to_ids("<s>")
    tokens = Tokens(adds_bos)
    assert tokens.bos == (bos,)
    assert tokens.chat.start()[0] == bos
    assert bos not in tokens.encode("word")
    tokens.check((bos, 7, 8))
    with pytest.raises(AssertionError, match="second BOS"):
        tokens.check((bos, 7, bos))


def test_bos_of_the_template_is_the_only_one(adds_bos: Any) -> None:
    adds_bos.chat_template = LLAMA
    tokens = Tokens(adds_bos)
    assert tokens.chat.start().count(tokens.bos[0]) == 1


def test_no_bos_where_the_tokenizer_adds_none(chatml: Any) -> None:
    assert Tokens(chatml).bos == ()


def test_a_piece_continues_the_text(plain: Any) -> None:
    """SentencePiece-like tokenizers invent a space before what they encode first; a piece must not have it."""
    from tokenizers import normalizers

    tokenizer = copy.deepcopy(plain)
    tokenizer.backend_tokenizer.normalizer = normalizers.Prepend(" ")
    tokens = Tokens(tokenizer)
    assert tokenizer.decode(tokens.encode("word")) == "word"
    assert tokenizer.decode(tokens.encode(" word")) == " word"
    assert tokens.encode("") == ()


def test_a_template_that_drops_contents_is_refused(plain: Any) -> None:
    with pytest.raises(ValueError, match="drops or repeats"):
        _ = Tokens(templated(plain, "{{ messages[0].role }}")).chat


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.content }}",  # never closed
        "{{ messages[0].content | no_such_filter }}",
        "{{ raise_exception('not for\nyou') }}",
        "{{ messages[0].content.nothing.at_all }}",
        "{{ 1 // 0 }}",
    ],
)
def test_a_template_that_fails_is_one_line(plain: Any, template: str) -> None:
    with pytest.raises(ValueError, match="its chat template fails") as caught:
        _ = Tokens(templated(plain, template)).chat
    assert "\n" not in str(caught.value)
