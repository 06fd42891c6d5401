"""The engine is compared with the model's own attention before a model is served, whatever the model is called."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvgate.engine import check_cache, self_check
from kvgate.engine.attention import Step, paged_attention
from kvgate.engine.models import LoadedModel, wrap
from kvgate.engine.probe import AttentionShape

Fixture = Callable[..., Any]
_JETMOE = {"kv_channels": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "num_attention_heads": 4}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVGATE_CACHE", str(tmp_path))


def unknown(model: Any) -> LoadedModel:
    """As if it were seen for the first time."""
    return replace(model.loaded, info=replace(model.loaded.info, weights_hash="unknown"))


def module_of(config: Any) -> Any:
    torch.manual_seed(11)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    "name, changes, says",
    [
        ("JetMoeConfig", _JETMOE, "number or size of heads differs"),  # repeats cached heads, in another order
        ("DiffLlamaConfig", {"num_attention_heads": 4}, "attends 2 times"),
        ("NemotronConfig", {}, "drops unknown arguments"),
        (
            "Gemma3nTextConfig",
            {"num_hidden_layers": 20, "num_kv_shared_layers": 5, "vocab_size_per_layer_input": 97},
            r"caches 0 times",
        ),
        ("RecurrentGemmaConfig", {}, "keep their memory elsewhere"),
    ],
)
def test_layers_that_pages_cannot_hold(tiny_config: Fixture, name: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        wrap(module_of(tiny_config(name, **changes)), None, name="some/model")
    assert str(caught.value).startswith("model 'some/model' (")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name, changes", [("JetMoeConfig", _JETMOE), ("DiffLlamaConfig", {"num_attention_heads": 4})])
def test_numbers_alone_show_a_wrong_exact_run(
    tiny_config: Fixture, monkeypatch: pytest.MonkeyPatch, name: str, changes: dict[str, Any]
) -> None:
    """As if nothing were seen in the calls: prefill is right, decode is not."""
    heads = 2
    shape = AttentionShape((None, None), 4 * (2 if name == "JetMoeConfig" else 1), heads, 8 if "Jet" in name else 12)
    monkeypatch.setattr("kvgate.engine.probe.attention_shape", lambda module, name: shape)
    monkeypatch.setattr(self_check, "attention_shape", lambda module, name: shape)
    with pytest.raises(ValueError, match="model 'some/model'") as caught:
        wrap(module_of(tiny_config(name, **changes)), None, name="some/model")
    assert "\n" not in str(caught.value)
    assert "differ from eager attention by" in str(caught.value) or "cannot be run" in str(caught.value)


def test_a_window_that_the_layers_ignore_is_no_window(tiny_config: Fixture, text: Fixture) -> None:
    """A leftover ``sliding_window`` in a Llama folder: nothing may be freed."""
    module = module_of(tiny_config("llama", sliding_window=12))
    loaded = wrap(module, None, name="leftover")
    assert loaded.info.native_windows == (None, None)


@pytest.mark.parametrize("claimed, first", [((12, 12), 12), ((None, 12), 12)])
def test_a_wrong_window_is_named_by_its_first_position(
    tiny: Fixture, claimed: tuple[int | None, ...], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = unknown(tiny("llama"))
    monkeypatch.setattr(self_check, "attention_shape", lambda module, name: AttentionShape(claimed, 6, 2, 8))
    attend = Step.attend
    monkeypatch.setattr(Step, "attend", lambda step, *given: attend(step, *given[:-1], step.native_windows[given[3]]))
    with pytest.raises(ValueError, match=rf"at position {first} \(prefill\) they differ from eager attention by \d"):
        self_check.check_once(model)


def test_a_difference_in_decode_only(tiny: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = Step.attend

    def broken(step: Step, *given: Any) -> torch.Tensor:
        return attend(step, *given) * (1.1 if step.parts[0].single else 1.0)

    monkeypatch.setattr(Step, "attend", broken)
    with pytest.raises(ValueError, match=r"at position 64 \(decode\)"):
        self_check.check_once(unknown(tiny("llama")))


def test_a_difference_beside_another_row_only(tiny: Fixture, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = Step.attend

    def broken(step: Step, *given: Any) -> torch.Tensor:
        out = attend(step, *given)
        return out.roll(1, 1) if len(step.parts[0].row_start_R1) > 2 else out

    monkeypatch.setattr(Step, "attend", broken)
    with pytest.raises(ValueError, match=r"at position 48 \(chunked prefill\)"):
        self_check.check_once(unknown(tiny("llama")))


@pytest.mark.parametrize("name", ["gemma2", "mistral", "phi3", "qwen2_window"])
def test_wide_windows_are_narrowed_and_still_checked(tiny: Fixture, name: str) -> None:
    """As wide as real ones: a copy with narrow windows is run, so the prompt is past them."""
    model = tiny(name, sliding_window=4096, max_position_embeddings=9000).loaded
    assert 4096 in model.info.native_windows
    copy = self_check._cut(model)
    assert self_check._narrow(copy)
    narrowed = self_check._as_loaded(copy, model, name)
    assert {window for window in narrowed.info.native_windows if window} == {32}
    assert self_check._length(narrowed) == 74
    assert self_check.self_check(model).position is None
    assert model.module.config.sliding_window == 4096, "the model itself is untouched"


def test_windows_that_differ_by_one_still_do_when_narrowed(tiny: Fixture) -> None:
    module = self_check._cut(tiny("mistral", sliding_window=4096).loaded)
    module.model.layers[0].self_attn.sliding_window = 4095
    module.config.other_window = 512
    assert self_check._narrow(module)
    assert module.config.other_window == 32
    assert module.model.layers[0].self_attn.sliding_window == 40
    assert module.config.sliding_window == 41


def test_a_big_model_is_cut_to_its_first_layers_of_every_kind(
    tiny_config: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = ["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"] * 4
    model = wrap(module_of(tiny_config("gemma3", num_hidden_layers=8, layer_types=kinds)), None, name="tiny")
    monkeypatch.setattr(self_check, "_BIG", 1000)
    found = self_check.self_check(model)
    assert (found.layers, found.position) == (4, None)
    assert len(model.module.model.layers) == 8, "the model itself stays whole"
    assert model.module.config.num_hidden_layers == 8


# -- what is remembered ---------------------------------------------------------------------------------------------


def test_a_model_is_checked_once(tiny: Fixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = unknown(tiny("llama"))
    assert self_check.check_once(model) is not None
    runs = count_runs(monkeypatch)
    assert self_check.check_once(model) is None
    assert runs == []
    self_check.check_once(replace(model, info=replace(model.info, weights_hash="other")))
    monkeypatch.setattr(check_cache, "engine_hash", lambda: "other code")
    self_check.check_once(model)
    monkeypatch.setattr(check_cache, "version", lambda package: "0.0")
    self_check.check_once(model)
    assert len(runs) == 3, "weights, code and library versions"
    for file in (tmp_path / "self-checks").iterdir():
        file.write_text("{")
    self_check.check_once(model)
    assert len(runs) == 4, "what cannot be read is not believed"


def test_a_refused_model_is_not_remembered(tiny_config: Fixture, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="attends 2 times"):
        wrap(module_of(tiny_config("DiffLlamaConfig", num_attention_heads=4)), None, name="some/model")
    assert not (tmp_path / "self-checks").exists()


def test_a_cache_that_cannot_be_written_costs_time_only(
    tiny: Fixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVGATE_CACHE", str(tmp_path / "file"))  # a file where a folder is expected, also for root
    assert self_check.check_once(unknown(tiny("llama"))) is not None
    assert self_check.check_once(unknown(tiny("llama"))) is not None


def test_concurrent_writers_leave_one_whole_entry(tmp_path: Path) -> None:
    def write(number: int) -> None:
        for _ in range(20):
            check_cache.remember("key", {"number": number, "padding": "x" * 5000})
            found = check_cache.recall("key")
            assert found is not None
            assert len(found["padding"]) == 5000

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [file.name for file in (tmp_path / "self-checks").iterdir()] == ["key.json"]
    assert json.loads((tmp_path / "self-checks" / "key.json").read_text())["key"] == "key"


def count_runs(monkeypatch: pytest.MonkeyPatch) -> list[LoadedModel]:
    runs: list[LoadedModel] = []
    real = self_check.self_check

    def counted(loaded: LoadedModel) -> self_check.Difference:
        runs.append(loaded)
        return real(loaded)

    monkeypatch.setattr(self_check, "self_check", counted)
    return runs


# -- the registered function ------------------------------------------------------------------------------------------


def test_the_attention_function_takes_dropout_as_sixth_and_scaling_as_seventh() -> None:
    """As transformers' registered functions do; libraries that wrap them all pass dropout by position."""
    seen: list[tuple[float, float | None, int | None]] = []

    class Step:
        position_T = torch.arange(3)

        def write(self, *given: Any) -> None: ...

        def attend(self, query: Any, key: Any, value: Any, layer: int, scale: float, softcap: Any, window: Any) -> Any:
            seen.append((scale, softcap, window))
            return query.transpose(1, 2)

    module = torch.nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    query = torch.randn(1, 2, 3, 16)
    paged_attention(module, query, query, query, None, 0.0, scaling=0.5, kvgate_step=Step())
    paged_attention(module, query, query, query, None, 0.0, 0.5, sliding_window=7, softcap=2.0, kvgate_step=Step())
    paged_attention(module, query, query, query, None, kvgate_step=Step())
    assert seen == [(0.5, None, None), (0.5, 2.0, 7), (0.25, None, None)]


def test_a_wrapper_around_all_attention_functions_does_not_break_the_engine(tiny: Fixture, text: Fixture) -> None:
    """What kvpress does when it is imported after a model was loaded."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model, tokens = tiny("llama"), text(20)
    own = ALL_ATTENTION_FUNCTIONS["kvgate_paged"]

    def wrapper(module: Any, query: Any, key: Any, value: Any, mask: Any, dropout: float, **more: Any) -> Any:
        return own(module, query, key, value, mask, dropout, **more)

    ALL_ATTENTION_FUNCTIONS["kvgate_paged"] = wrapper
    try:
        _, last = model.engine().prefill(tokens)
    finally:
        ALL_ATTENTION_FUNCTIONS["kvgate_paged"] = own
    torch.testing.assert_close(last, model.logits(tokens)[-1], rtol=0, atol=1e-4)
