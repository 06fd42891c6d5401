"""What cannot be served is refused by name, in one line, before anything is computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kvgate.engine.models import _hash_tensors, _max_positions, load_model, wrap
from kvgate.engine.refusals import refuse_config

Fixture = Callable[..., Any]


@pytest.mark.parametrize(
    "name, changes, says",
    [
        ("T5Config", {}, "encoder-decoder"),
        ("BartConfig", {}, "encoder-decoder"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic rotary"),
        (
            "gemma3",
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                }
            },
            "dynamic rotary",
        ),
    ],
)
def test_configurations(tiny_config: Fixture, name: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        refuse_config(tiny_config(name, **changes), "some/model")
    assert str(caught.value).startswith("model 'some/model' (")
    assert "kvgate serves decoder-only models" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name, changes, says",
    [
        ("GptOssConfig", {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8}, "learned sinks"),
        ("DeepseekV3Config", {"n_routed_experts": 8, "first_k_dense_replace": 2}, "number or size of heads differs"),
        ("MambaConfig", {}, "does not take another attention implementation"),
        ("JambaConfig", {}, "does not take another attention implementation"),
        ("RecurrentGemmaConfig", {}, "keep their memory elsewhere"),
        ("FalconH1Config", {}, "does not take another attention implementation"),
        ("NemotronHConfig", {}, "does not take another attention implementation"),
        ("Qwen3NextConfig", {}, "does not take another attention implementation"),
        ("MiniMaxConfig", {}, "cannot run on pages"),
        ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}, "cannot run on pages"),
        ("Llama4TextConfig", {"attention_chunk_size": 16, "num_local_experts": 2}, "are not its own: at position 16"),
        ("NemotronConfig", {}, "cannot run on pages"),
        ("BertConfig", {}, "attends in both directions"),
        ("RobertaConfig", {}, "attends in both directions"),
        ("gemma3", {"use_bidirectional_attention": True}, "attends in both directions"),
        ("FalconConfig", {}, "does not take another attention implementation"),
        ("BloomConfig", {}, "does not take another attention implementation"),
    ],
)
def test_modules(tiny_config: Fixture, name: str, changes: dict[str, Any], says: str) -> None:
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(name, **changes))
    with pytest.raises(ValueError, match=says) as caught:
        wrap(model, None, name="some/model")
    assert str(caught.value).startswith("model 'some/model'")
    assert "\n" not in str(caught.value)


def test_positions_end_where_longrope_would_switch(tiny_config: Fixture) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    changes = {"hidden_size": 48, "partial_rotary_factor": 1.0, "original_max_position_embeddings": 64}
    assert _max_positions(tiny_config("phi3", rope_parameters=rope, **changes)) == 64
    assert _max_positions(tiny_config("llama")) == 256


@pytest.mark.parametrize(
    "declared, original, factor, served",
    [(256, 256, 4.0, 1024), (256, None, 4.0, 1024), (1024, 256, 4.0, 1024), (512, 256, 4.0, 1024)],
)
def test_yarn_serves_the_scaled_length(
    tiny_config: Fixture, declared: int, original: int | None, factor: float, served: int
) -> None:
    """Also where ``max_position_embeddings`` was left at the original length, as model cards tell users to do."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": factor}
    rope |= {} if original is None else {"original_max_position_embeddings": original}
    assert _max_positions(tiny_config("qwen2", max_position_embeddings=declared, rope_parameters=rope)) == served


def test_weights_of_no_dimension_have_a_hash(tiny_config: Fixture) -> None:
    module = transformers.AutoModelForCausalLM.from_config(tiny_config("llama"))
    module.register_parameter("alone", torch.nn.Parameter(torch.tensor(1.0)))
    first = _hash_tensors(module)
    module.alone.data.fill_(2.0)
    assert _hash_tensors(module) != first


def test_a_tokenizer_with_more_ids_than_the_embedding_has_rows(saved: Path) -> None:
    file = saved / "tokenizer.json"
    file.write_text(file.read_text().replace('"c":2', '"c":97'))
    one_line(lambda: load_model(str(saved)), "writes ids up to 97, its embedding has 97 rows")
    file.write_text(file.read_text().replace('"c":97', '"c":96'))
    load_model(str(saved))


def test_heads_of_several_sizes(tiny_config: Fixture) -> None:
    sizes = {"head_dim": 16, "global_head_dim": 32, "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 97}
    module = transformers.AutoModelForCausalLM.from_config(tiny_config("Gemma4TextConfig", **sizes))
    one_line(lambda: wrap(module, None, name="sizes"), r"differs between layers.*\(2 of 16 or 2 of 32\)")


def test_heads_that_differ_between_layers_by_configuration() -> None:
    one_line(
        lambda: refuse_config(transformers.Dots3NoteTextConfig(), "dots"), "attention heads differs between layers"
    )


def test_the_attention_function_says_when_it_is_called_from_elsewhere(tiny: Fixture) -> None:
    with pytest.raises(ValueError, match="outside the kvgate engine"):
        tiny("llama").loaded.module(torch.tensor([[3, 4]]))


@pytest.fixture
def saved(tiny: Fixture, tmp_path: Path) -> Path:
    """A model folder as save_pretrained leaves it, with a tokenizer that knows three words."""
    tiny("llama").copy.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(
        '{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,'
        '"pre_tokenizer":{"type":"Whitespace"},"post_processor":null,"decoder":null,'
        '"model":{"type":"WordLevel","vocab":{"a":0,"b":1,"c":2},"unk_token":"a"}}'
    )
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class":"PreTrainedTokenizerFast"}')
    return tmp_path


def test_a_saved_folder_loads_and_is_named_by_its_contents(tiny: Fixture, saved: Path) -> None:
    first = load_model(str(saved), dtype="float32")
    assert first.info.revision == "local"
    assert (first.info.layers, first.info.query_heads, first.info.kv_heads, first.info.head_dim) == (2, 6, 2, 8)
    assert first.info.weights_hash == load_model(str(saved), dtype="bfloat16").info.weights_hash
    weights = saved / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    assert load_model(str(saved), dtype="float32").info.weights_hash != first.info.weights_hash


def test_a_folder_without_weights(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    one_line(lambda: load_model(str(saved)), "has no weights")


def test_a_folder_without_configuration(saved: Path) -> None:
    (saved / "config.json").unlink()
    one_line(lambda: load_model(str(saved)), "has no config.json")


def test_truncated_weights(saved: Path) -> None:
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    one_line(lambda: load_model(str(saved)), "cannot be loaded")


def test_a_broken_configuration(saved: Path) -> None:
    (saved / "config.json").write_text("{")
    one_line(lambda: load_model(str(saved)), "cannot be loaded")


def test_a_configuration_of_no_known_kind(saved: Path) -> None:
    (saved / "config.json").write_text('{"model_type": "no_such_model"}')
    one_line(lambda: load_model(str(saved)), "cannot be loaded")


def test_weights_that_do_not_fit_the_configuration(saved: Path) -> None:
    config = saved / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 64', '"intermediate_size": 80'))
    one_line(lambda: load_model(str(saved)), "cannot be loaded")


def test_weights_that_lack_a_tensor_are_not_made_up(saved: Path) -> None:
    """transformers fills what is missing with random numbers and goes on."""
    weights = saved / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    one_line(lambda: load_model(str(saved)), "lack 1 tensors, model.layers.1.self_attn.k_proj.weight among them")


def test_a_folder_without_tokenizer(saved: Path) -> None:
    (saved / "tokenizer.json").unlink()
    (saved / "tokenizer_config.json").unlink()
    one_line(lambda: load_model(str(saved)), "cannot be loaded")


def test_no_such_folder_and_no_such_dtype(tmp_path: Path) -> None:
    one_line(lambda: load_model(str(tmp_path / "nowhere")), "no such folder")
    one_line(lambda: load_model(str(tmp_path), dtype="float8"), "choose one of float32, bfloat16, float16")


def one_line(load: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        load()
    assert "\n" not in str(caught.value)
