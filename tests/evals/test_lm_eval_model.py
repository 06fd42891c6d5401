"""kvgate as an lm-eval model on a tiny random model, beside lm-eval's own Hugging Face model."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from lm_eval.api.registry import get_model
from tiny_model import save_tiny_model

from kvgate.evals.data.items import External, candidates_of
from kvgate.evals.lm_eval.bench import ROLLING_CHUNK, Bench
from kvgate.evals.lm_eval.items import Generation, Origin
from kvgate.evals.lm_eval.model import KvgateLM, configuration_of
from kvgate.evals.plan.cells import EXACT_CONFIGURATION

TEXT = "The quick brown fox jumps over the lazy dog. "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("tiny") / "model", seed=5))


@pytest.fixture(scope="module")
def exact(folder: str) -> KvgateLM:
    return KvgateLM(folder, dtype="float32")


@pytest.fixture(scope="module")
def evicted(folder: str) -> KvgateLM:
    return KvgateLM(folder, policy="h2o@0.25", dtype="float32")


def request(kind: Any, *arguments: Any, document: int = 0) -> Instance:
    return Instance(kind, {}, arguments, 0, ("made_up", document, 1))


def likelihoods() -> list[Instance]:
    contexts = [(TEXT * 3, end) for end in ("over", "u", " y z")] + [
        ("", "hello world"),
        ("Q", "a"),
        ("ends in a space ", "b"),
    ]
    return [request("loglikelihood", *pair, document=at) for at, pair in enumerate(contexts)]


def test_the_exact_run_agrees_with_lm_evals_own_model(folder: str, exact: KvgateLM) -> None:
    from lm_eval.models.huggingface import HFLM

    reference = HFLM(pretrained=folder, dtype="float32", device="cpu", batch_size=1)
    for ours, theirs in zip(exact.loglikelihood(likelihoods()), reference.loglikelihood(likelihoods()), strict=True):
        assert ours[0] == pytest.approx(theirs[0], abs=1e-3)
        assert ours[1] == theirs[1]
    written = [request("generate_until", TEXT * 2, {"until": ["\n"], "max_gen_toks": 24}, document=9)]
    assert exact.generate_until(written) == reference.generate_until(written)
    whole = [request("loglikelihood_rolling", TEXT * 9)]
    assert exact.loglikelihood_rolling(whole) == pytest.approx(reference.loglikelihood_rolling(whole), abs=1e-2)


def test_eviction_changes_answers_even_of_one_token_and_a_covering_budget_does_not(
    folder: str, exact: KvgateLM, evicted: KvgateLM
) -> None:
    plain, lossy = exact.loglikelihood(likelihoods()), evicted.loglikelihood(likelihoods())
    assert all(abs(plain[at][0] - lossy[at][0]) > 1e-4 for at in (0, 1, 2))
    assert lossy[4][0] == pytest.approx(plain[4][0], abs=1e-6)  # one token of context: nothing can be evicted
    covered = KvgateLM(folder, policy="h2o@4000", dtype="float32")
    for one, other in zip(covered.loglikelihood(likelihoods()), plain, strict=True):
        assert one[0] == pytest.approx(other[0], abs=1e-5)
    whole = [request("loglikelihood_rolling", TEXT * 9)]
    assert covered.loglikelihood_rolling(whole) == pytest.approx(exact.loglikelihood_rolling(whole), abs=1e-4)
    assert abs(evicted.loglikelihood_rolling(whole)[0] - exact.loglikelihood_rolling(whole)[0]) > 1e-3
    record = next(iter(evicted.bench.records.values()))["h2o@0.25"]
    assert record.evicted_tokens > 0


def test_one_prefill_a_context_serves_all_columns_and_continuations(
    exact: KvgateLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvgate.engine.engine import Engine

    seen: list[int] = []
    prefill = Engine.prefill
    monkeypatch.setattr(
        Engine, "prefill", lambda self, tokens, **k: (seen.append(len(tokens)), prefill(self, tokens, **k))[1]
    )
    bench = Bench(
        exact.bench.loaded, [EXACT_CONFIGURATION, configuration_of("h2o@0.5"), configuration_of("sliding_window@0.5")]
    )
    asked = [request("loglikelihood", TEXT, end) for end in ("a", "b c", "d")]
    answers = {
        configuration.label: KvgateLM.on(bench, configuration.label).loglikelihood(asked)
        for configuration in bench.configurations
    }
    assert seen == [len(TEXT) - 2]  # the trailing space belongs to the continuation, the last token is held back
    assert len({tuple(found) for found in answers.values()}) == 3


def test_rolling_holds_the_budget_between_chunks(exact: KvgateLM) -> None:
    from kvgate.engine.engine import Engine

    bench = Bench(exact.bench.loaded, [configuration_of("streaming_llm@32")])
    live: list[int] = []
    extend = Engine.extend

    def watched(self: Engine, rows: Any, tokens: Any, **options: Any) -> Any:
        live.append(int(self.tables.live_counts(rows[0].id).max()))
        assert len(tokens[0]) <= ROLLING_CHUNK
        return extend(self, rows, tokens, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "extend", watched)
        KvgateLM.on(bench, bench.configurations[0].label).loglikelihood_rolling(
            [request("loglikelihood_rolling", TEXT * 9)]
        )
    assert len(live) == -(-len(TEXT * 9) // ROLLING_CHUNK)
    assert max(live) == 32


@pytest.mark.slow
def test_a_text_longer_than_the_model_is_rolled_in_lm_evals_windows(exact: KvgateLM) -> None:
    text = TEXT * 100  # 4500 tokens, 4096 positions
    (found,) = exact.loglikelihood_rolling([request("loglikelihood_rolling", text)])
    assert found < (exact.loglikelihood_rolling([request("loglikelihood_rolling", text[:4000])])[0])


def test_stop_texts_cut_the_answer_and_end_the_work(exact: KvgateLM) -> None:
    (free,) = exact.generate_until([request("generate_until", TEXT, {"max_gen_toks": 30}, document=1)])
    assert len(free) > 3
    stop = free[2:4]
    asked = [request("generate_until", TEXT, {"until": [stop], "max_gen_toks": 30}, document=12)]
    assert exact.generate_until(asked) == [free[: free.index(stop)]]
    (item,) = exact.asked[Origin("made_up", 12)]
    record = exact.bench.records[item.item_hash]["full"]
    assert record.turns[0].text.endswith(stop)
    assert not record.turns[0].capped
    assert item.turns[0].until == (stop,)
    assert item.turns[0].scoring == External()
    assert candidates_of(item.turns[0]) == ()


@pytest.mark.parametrize(
    "given, message",
    [
        ({"do_sample": True}, "sampling"),
        ({"temperature": 0.7}, "sampling"),
        ({"num_beams": 4}, "num_beams"),
        ({"max_gen_toks": 0}, "max_gen_toks is 0"),
    ],
)
def test_generation_that_greedy_decoding_cannot_honour_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"task made_up.*{message}"):
        Generation.parse(given, Origin("made_up", 3))


def test_what_does_not_fit_is_refused_by_name_never_cut(exact: KvgateLM) -> None:
    with pytest.raises(ValueError, match=r"task made_up, document 7: needs .* the model has 4096"):
        exact.loglikelihood([request("loglikelihood", "x" * 4096, "y", document=7)])
    with pytest.raises(ValueError, match="task made_up, document 8: needs"):
        exact.generate_until([request("generate_until", "x" * 4000, {"max_gen_toks": 100}, document=8)])
    with pytest.raises(ValueError, match="document 0: continuation '' has no tokens"):
        exact.loglikelihood([request("loglikelihood", "x", "")])


def test_a_run_leaves_out_what_does_not_fit_and_goes_on(exact: KvgateLM) -> None:
    """One document of a task never costs the others; whoever evaluates is told which to leave out."""
    lm = KvgateLM.on(exact.bench, exact.label)
    fine, long, empty = ("abc", "d"), ("x" * 4096, "y"), ("x", "")
    asked = [request("loglikelihood", *pair, document=at) for at, pair in enumerate((fine, long, empty, fine))]
    found = lm.loglikelihood(asked)
    assert found[0] == found[3] == exact.loglikelihood(asked[:1])[0]
    assert lm.generate_until([request("generate_until", "x" * 4000, {"max_gen_toks": 100}, document=8)]) == [""]
    assert {origin.document for origin in lm.left_out or {}} == {1, 2, 8}
    assert {origin.document for origin in lm.asked} == {0, 3}


@pytest.fixture(scope="module")
def appending(folder: str) -> KvgateLM:
    """A tokenizer that puts BOS before and EOS behind whatever it encodes."""
    from tokenizers import processors

    lm = KvgateLM(folder, dtype="float32")
    tokenizer = copy.deepcopy(lm.tokenizer)
    tokenizer.bos_token = "!"
    bos, eos = tokenizer.convert_tokens_to_ids(["!", "<eos>"])
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="! $A <eos>", special_tokens=[("!", bos), ("<eos>", eos)]
    )
    lm.bench = replace(lm.bench, loaded=replace(lm.bench.loaded, tokenizer=tokenizer), records={})
    lm._attach(lm.bench, lm.label)
    return lm


def test_an_end_of_sequence_token_is_never_what_is_scored(appending: KvgateLM, exact: KvgateLM) -> None:
    """Such tokenizers made every one-token option the same token, so that all options tied under every policy."""
    assert appending.tokenizer.encode("ab")[-1] == appending.tokenizer.eos_token_id, "the tokenizer does append it"
    asked = [request("loglikelihood", TEXT, option) for option in "ABCD"]
    scores = [score for score, _ in appending.loglikelihood(asked)]
    assert len(set(scores)) == 4
    assert scores == pytest.approx(
        [s for s, _ in exact.loglikelihood([request("loglikelihood", "!" + TEXT, o) for o in "ABCD"])]
    )
    assert appending.tok_encode("!ab") == appending.tok_encode("ab"), "one BOS"
    assert appending.tok_encode("ab", add_special_tokens=False) == exact.tok_encode("ab")


def test_a_token_that_spans_the_join_is_counted(folder: str) -> None:
    """Scored as lm-eval does it, the context's own encoding and what is left of the whole; no task ends over it."""
    lm = KvgateLM.on(KvgateLM(folder, dtype="float32").bench, "full")
    ids = {"ab": [1], "abc": [2], "abcd": [2, 3], "x": [4], "xy": [4, 5], "q": [6, 7], "qr": [6, 8]}
    lm.tok_encode = lambda text, **options: list(ids[text])  # type: ignore[method-assign]
    cuts = {pair: lm._encoded(request("loglikelihood", *pair, document=at)) for at, pair in enumerate(
        [("x", "y"), ("ab", "cd"), ("ab", "c"), ("q", "r")]
    )}  # fmt: skip
    assert cuts["x", "y"] == ((4,), (5,))
    assert cuts["ab", "cd"] == ((1,), (3,)), "as lm-eval cuts it"
    assert cuts["ab", "c"] == ((lm.prefix_token_id,), (2,)), "nothing was left: the whole token is scored"
    assert cuts["q", "r"] == ((6,), (8,))
    assert {origin.document for origin in lm.spanning} == {1, 2, 3}


def test_lm_evals_response_cache_cannot_mix_policies(
    folder: str, exact: KvgateLM, evicted: KvgateLM, tmp_path: Path
) -> None:
    name = str(tmp_path / "answers.db")
    first = CachingLM(exact, name).loglikelihood(likelihoods())
    assert CachingLM(exact, name).loglikelihood(likelihoods()) == first
    with pytest.raises(ValueError, match="another model, policy or version"):
        CachingLM(evicted, name)
    same = KvgateLM(folder, dtype="float32")
    assert same.identity == exact.identity
    assert CachingLM(same, name).loglikelihood(likelihoods()) == first
    assert not same.bench.records  # all from the cache
    others = [evicted.identity, KvgateLM(folder, policy="h2o@0.5", dtype="float32").identity]
    others.append(KvgateLM(folder, dtype="bfloat16").identity)
    assert len({exact.identity, *others}) == 4
    assert exact.cache_name("x") != evicted.cache_name("x")


def test_a_cache_that_another_model_filled_is_refused(exact: KvgateLM, tmp_path: Path) -> None:
    from lm_eval.models.dummy import DummyLM

    name = str(tmp_path / "answers.db")
    CachingLM(DummyLM(), name).loglikelihood(likelihoods())
    with pytest.raises(ValueError, match="another model"):
        CachingLM(exact, name)


def test_it_is_registered_by_name(folder: str) -> None:
    made = get_model("kvgate").create_from_arg_string(
        f"pretrained={folder},policy=h2o@0.5,dtype=float32", {"batch_size": 4}
    )
    assert isinstance(made, KvgateLM)
    assert made.label == "h2o@0.5"
    with pytest.raises(ValueError, match="one budget"):
        configuration_of("h2o@0.5,0.25")
    with pytest.raises(ValueError, match="unknown"):
        configuration_of("magic@0.5")
