"""Every causal language model class of transformers, tiny and random: is it served right, refused, or served wrong?

    python benchmarks/architectures.py --out results/architectures

Each class is built from its own default configuration with small sizes (classes that cannot be made small are listed
as not built), its weights are drawn at random, and it is loaded into the engine as any model would be, self-check
included. What loads is then compared with its own eager attention on other prompts, other chunks and more decode steps
than the self-check uses. Classes run in batches of a process each, so that a crash costs one batch.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

BATCH = 12
MOST_PARAMETERS = 30_000_000
TOLERANCE = 1e-3  # of the standard deviation of the model's own logits
OUTCOMES = ("right", "refused", "wrong", "traceback", "not built", "crashed")
SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "sliding_window": 12,
    "attention_window_size": 12, "attention_chunk_size": 16, "n_embd": 64, "n_layer": 4, "n_head": 4,
    "n_positions": 256, "n_ctx": 256, "n_inner": 96, "d_model": 64, "num_layers": 4, "num_heads": 4, "d_ff": 96,
    "ffn_dim": 96,
    "decoder_layers": 2, "encoder_layers": 2, "decoder_attention_heads": 4, "encoder_attention_heads": 4,
    "decoder_ffn_dim": 96, "encoder_ffn_dim": 96, "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "n_shared_experts": 1,
    "moe_num_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "kv_channels": 16,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 97, "embedding_size": 64,
    "word_embed_proj_dim": 64,
    "initializer_range": 0.2, "global_head_dim": 16, "rotary_dim": 16, "dim": 64, "n_layers": 4, "n_heads": 4,
    "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "num_experts_per_token": 2, "moe_layer_start_index": 1,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "mamba_d_state": 8, "mamba_d_head": 16, "mamba_n_heads": 8, "state_size": 8, "lru_width": 64, "conv_kernel": 4,
}  # fmt: skip
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def classes() -> dict[str, str]:
    """Model type -> causal class."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as names

    return dict(sorted(names.items()))


def build(kind: str) -> Any:
    """A tiny random model of a type, sizes shrunk wherever its configuration has them."""
    import torch
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[kind]
    default = config()
    nested = default.get_text_config() is not default
    text = {key: value for key, value in {**SIZES, **SPECIAL}.items() if _takes(default.get_text_config(), key)}
    if nested:
        parts = {key: text for key in ("text_config", "decoder", "llm_config") if hasattr(default, key)}
        small = config(**parts)
    else:
        small = config(**text)
    with torch.device("meta"):
        size = sum(part.numel() for part in transformers.AutoModelForCausalLM.from_config(small).parameters())
    if size > MOST_PARAMETERS:
        raise MemoryError(f"{size} parameters even when made small")
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(small).float().eval()
    for parameter in model.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    return model


def _takes(default: Any, key: str) -> bool:
    named = key in SPECIAL or key in ("num_key_value_heads", "head_dim")
    try:
        return getattr(default, key, None) is not None or (named and hasattr(default, key))
    except RuntimeError:  # differs between layers; its own default stays
        return False


def examine(kind: str, name: str) -> dict[str, Any]:
    """One class: outcome and reason."""
    import copy

    import torch

    from kvgate.engine.models import wrap

    try:
        model = build(kind)
        own = copy.deepcopy(model)
    except Exception as error:
        return _row(kind, name, "not built", f"{type(error).__name__}: {error}")
    try:
        loaded = wrap(model, None, name=kind)
    except ValueError as error:
        return _row(kind, name, "refused", str(error))
    except Exception:
        return _row(kind, name, "traceback", traceback.format_exc().strip().splitlines()[-1])
    try:
        with torch.inference_mode():
            apart, spread = difference(loaded, own)
    except Exception:
        return _row(kind, name, "traceback", traceback.format_exc().strip().splitlines()[-1])
    windows = sorted({str(window) for window in loaded.info.native_windows})
    said = f"largest difference {apart:.1e} at spread {spread:.2g}, windows {', '.join(windows)}"
    return _row(kind, name, "right" if apart <= TOLERANCE * spread else "wrong", said)


def difference(loaded: Any, own: Any) -> tuple[float, float]:
    """Largest logit difference over two texts of 120 tokens, prefilled in chunks, 30 decoded side by side."""
    import torch

    from kvgate.engine.engine import Engine

    texts = torch.randint(3, 96, (2, 120), generator=torch.Generator().manual_seed(99)).tolist()
    engine = Engine(loaded, pages=6000, page_size=8, prefill_chunk=33)
    rows = [engine.begin(), engine.begin()]
    got = [
        torch.cat([engine.extend([row], [text[at : at + 33]], every=True) for at in (0, 33)])
        for row, text in zip(rows, texts, strict=True)
    ]
    more = engine.extend(rows, [text[66:90] for text in texts], every=True)
    got = [torch.cat([part, more[24 * index : 24 * index + 24]]) for index, part in enumerate(got)]
    for at in range(90, 120):
        last = engine.extend(rows, [[text[at]] for text in texts])
        got = [torch.cat([part, last[index : index + 1]]) for index, part in enumerate(got)]
    own.set_attn_implementation("eager")
    want = [own(torch.tensor([text]), use_cache=False).logits[0] for text in texts]
    apart = max(float((a - b).abs().max()) for a, b in zip(got, want, strict=True))
    return apart, float(torch.stack(want).std())


def _row(kind: str, name: str, outcome: str, reason: str) -> dict[str, Any]:
    return {"type": kind, "class": name, "outcome": outcome, "reason": " ".join(reason.split())[:300]}


def _batch(kinds: list[str], seconds: int) -> list[dict[str, Any]]:
    """A batch in a process of its own; where it dies, its classes one by one."""
    names = classes()
    command = [sys.executable, __file__, "--only", *kinds]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
        rows: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        died = f"exit {done.returncode}: {done.stderr.strip()[-200:]}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        rows, died = [], f"no answer in {seconds} s"
    if len(rows) == len(kinds):
        return rows
    if len(kinds) == 1:
        return [_row(kinds[0], names[kinds[0]], "crashed", died)]
    return [row for kind in kinds for row in _batch([kind], seconds)]


def _markdown(rows: list[dict[str, Any]], versions: str) -> str:
    counts = Counter(row["outcome"] for row in rows)
    lines = [
        "# Causal classes of transformers under kvgate",
        "",
        f"{len(rows)} classes, {versions}; made by `python benchmarks/architectures.py`.",
        "",
        "| outcome | classes |",
        "|---|---:|",
        *(f"| {outcome} | {counts.get(outcome, 0)} |" for outcome in OUTCOMES),
        "",
        "| type | class | outcome | what was seen or said |",
        "|---|---|---|---|",
        *(f"| {row['type']} | {row['class']} | {row['outcome']} | {row['reason'].replace('|', '/')} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Sweep, or examine the classes given with --only and print a line of JSON for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/architectures"))
    parser.add_argument("--only", nargs="+", metavar="TYPE")
    parser.add_argument("--seconds", type=int, default=600, help="most a batch may take")
    args = parser.parse_args()
    names = classes()
    if args.only:
        for kind in args.only:
            print(json.dumps(examine(kind, names[kind])), flush=True)
        return
    import torch
    import transformers

    started, kinds = time.monotonic(), list(names)
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    rows: list[dict[str, Any]] = []
    args.out.mkdir(parents=True, exist_ok=True)
    for at in range(0, len(kinds), BATCH):
        rows += _batch(kinds[at : at + BATCH], args.seconds)
        found = {"versions": versions, "classes": rows}
        (args.out / "architectures.json").write_text(json.dumps(found, indent=1) + "\n")
        (args.out / "architectures.md").write_text(_markdown(rows, versions))
    print(dict(Counter(row["outcome"] for row in rows)), f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
