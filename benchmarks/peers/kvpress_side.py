"""Runs in kvpress's own environment, called by ``kvpress_tokens.py``: which positions each press keeps, as JSON.

Reads ``{"model": folder, "ids": [...], "kept": n, "presses": {name: class}}`` and writes
``{name: [layer][head][positions]}``.
"""

import json
import sys
from pathlib import Path

import kvpress
import torch
import transformers
from transformers import AutoModelForCausalLM


def positions(kept: torch.Tensor, keys: torch.Tensor) -> list[list[int]]:
    """Where the rows of ``kept`` ``[1, H, n, D]`` stand in ``keys`` ``[1, H, T, D]``; every key occurs once."""
    same = (kept[0, :, :, None] == keys[0, :, None]).all(-1)
    assert (same.sum(-1) == 1).all(), "equal keys at several positions"
    return [sorted(head.int().argmax(-1).tolist()) for head in same]


def run(model: torch.nn.Module, ids: list[int], press: kvpress.ScorerPress) -> list[list[list[int]]]:
    """What the press's own ``compress`` leaves in each layer."""
    found: list[list[list[int]]] = []
    compress = press.compress

    def watched(module, hidden_states, keys, values, attentions, kwargs):  # type: ignore[no-untyped-def]
        left, others = compress(module, hidden_states, keys, values, attentions, kwargs)
        found.append(positions(left, keys))
        return left, others

    press.compress = watched
    with torch.no_grad(), press(model):
        model(torch.tensor([ids]), use_cache=True)
    return found


def main() -> None:
    """One JSON in, one out."""
    transformers.utils.logging.disable_progress_bar()
    job = json.loads(Path(sys.argv[1]).read_text())
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
    length = len(job["ids"])
    ratio = 1 - (job["kept"] + 0.5) / length
    answers = {}
    for name, kind in job["presses"].items():
        answers[name] = run(model, job["ids"], getattr(kvpress, kind)(compression_ratio=ratio))
    Path(sys.argv[2]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
