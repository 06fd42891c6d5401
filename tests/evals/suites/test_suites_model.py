"""The embedded model, uncompressed and by plain transformers, can do what the default suites ask."""

from typing import Any

import pytest

from kvgate.evals.data.items import Choice, Ids, Item, Listing, Turn
from kvgate.evals.data.tokens import Tokens
from kvgate.evals.scoring.scores import score_answer, score_choice
from kvgate.evals.suites.base import BuildSpec
from kvgate.evals.suites.catalog import suite_class

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def embedded() -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvgate.engine.embedded import embedded_folder

    try:
        folder = embedded_folder()
    except ValueError as error:
        pytest.skip(f"the embedded model is not installed: {error}")
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", ["retrieval", "code", "multi_turn"])
def test_the_exact_run_is_competent(embedded: tuple[Any, Any], name: str) -> None:
    model, tokenizer = embedded
    items = suite_class(name)().build(Tokens(tokenizer), BuildSpec(counts={512: 3}))
    scores = [score for item in items for score in _scores(model, tokenizer, item)]
    assert sum(scores) / len(scores) >= 0.7, scores


def test_the_exact_run_keeps_long_answers_going(embedded: tuple[Any, Any]) -> None:
    """The list has to be in the answer for hundreds of tokens, or nothing is evicted while it is written."""
    model, tokenizer = embedded
    spec = BuildSpec(counts={512: 1}, options={"new_tokens": 520})
    for item in suite_class("long_generation")().build(Tokens(tokenizer), spec):
        (turn,) = item.turns
        assert isinstance(turn.scoring, Listing)
        answer = _greedy(model, [*item.context, *turn.prompt], turn, {tokenizer.eos_token_id})
        assert len(answer) >= 500, item.task
        assert score_answer(tokenizer.decode(answer), turn.scoring) >= 0.7, item.task


def _scores(model: Any, tokenizer: Any, item: Item) -> list[float]:
    """Greedy answers over the growing history; scored turns only."""
    history, scores = list(item.context), []
    for turn in item.turns:
        history += turn.prompt
        if isinstance(turn.scoring, Choice):
            means = [_mean_log_prob(model, history, candidate) for candidate in turn.scoring.candidates]
            scores.append(score_choice(means, turn.scoring.gold))
            continue
        answer = _greedy(model, history, turn, {tokenizer.eos_token_id})
        history += [*answer, *turn.closing]
        if turn.scoring is not None:
            scores.append(score_answer(tokenizer.decode(answer), turn.scoring))
    return scores


def _greedy(model: Any, history: list[int], turn: Turn, ends: set[int]) -> list[int]:
    import torch

    new: list[int] = []
    cache, feed = None, history
    with torch.no_grad():
        while len(new) < turn.max_new_tokens:
            out = model(torch.tensor([feed]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, feed = out.past_key_values, [int(out.logits[0, -1].argmax())]
            if feed[0] in ends or feed[0] in turn.stop:
                break
            new += feed
    return new


def _mean_log_prob(model: Any, history: list[int], candidate: Ids) -> float:
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([[*history, *candidate]]), logits_to_keep=len(candidate) + 1).logits[0, :-1].float()
    return float(logits.log_softmax(-1).gather(1, torch.tensor(candidate)[:, None]).mean())
