"""A small real tokenizer, trained here, so that suite tests need neither model nor network."""

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvgate.evals.data.corpus import passages
from kvgate.evals.data.tokens import Tokens

CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}{{ '<|im_start|>system\nBe helpful<|im_end|>\n' "
    "}}{% endif %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def bpe() -> Tokenizer:
    """Byte-level BPE over the text that haystacks are made of."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    text = [" ".join(sentence for paragraph in passage.paragraphs for sentence in paragraph) for passage in passages()]
    specials = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=3000, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer


@pytest.fixture(scope="session")
def plain(bpe: Tokenizer) -> Any:
    """A base model's tokenizer: no template, no BOS."""
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="session")
def chatml(bpe: Tokenizer) -> Any:
    """A chat model's tokenizer with a system text of its own."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<|im_start|>", eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture(scope="session")
def tokens(chatml: Any) -> Tokens:
    return Tokens(chatml)
