"""A model's tokenizer without its weights, and what is known of the weights without loading them."""

from __future__ import annotations

from pathlib import Path
from textwrap import shorten
from typing import Any

from kvgate.engine.embedded import EMBEDDED, embedded_folder


def load_tokenizer(name: str, revision: str | None = None) -> Any:
    """The tokenizer of "embedded", a local folder or a hub id. ValueError, one line, if it cannot be had."""
    import transformers

    folder = model_folder(name)
    where = {"revision": revision} if folder is None else {}
    try:
        return transformers.AutoTokenizer.from_pretrained(str(folder or name), **where)
    except Exception as error:  # whatever transformers and the hub come up with
        reason = shorten(" ".join(str(error).split()) or type(error).__name__, 300)
        raise ValueError(f"model {name!r}: its tokenizer cannot be loaded: {reason}") from error


def model_folder(name: str) -> Path | None:
    """Where the model's files are, if that is a local folder. ValueError for a path at which there is none."""
    if name == EMBEDDED:
        return embedded_folder()
    if Path(name).is_dir():
        return Path(name)
    if name.startswith((".", "/", "~")):
        raise ValueError(f"model {name!r}: no such folder")
    return None
