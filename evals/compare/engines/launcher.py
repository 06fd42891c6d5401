"""Starts an engine on loopback for as long as it is needed, and ends it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryFile

import kvgate

ENGINES = {
    "llama.cpp": ("kvgate.evals.compare.engines.llama_cpp_server", "xllamacpp"),
    "openvino": ("kvgate.evals.compare.engines.openvino_server", "openvino_genai"),
}
START = 120.0  # seconds until an engine must listen


def engines_python() -> str:
    """The interpreter that has the engines: ``KVGATE_ENGINES_PYTHON``, or this one (extra ``engines``)."""
    return os.environ.get("KVGATE_ENGINES_PYTHON", sys.executable)


def installed(engine: str) -> bool:
    """Whether that interpreter has the engine's package."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({ENGINES[engine][1]!r}) is None)"
    return subprocess.run([engines_python(), "-c", code], check=False).returncode == 0


@contextlib.contextmanager
def launched(engine: str, model: Path, flags: Sequence[str] = ()) -> Iterator[str]:
    """The address of a running engine. ValueError if it does not come up, with the end of what it said."""
    if engine not in ENGINES:
        raise ValueError(f"engine {engine!r}: unknown; use {' or '.join(ENGINES)}")
    port = _free_port()
    command = [engines_python(), "-m", ENGINES[engine][0], "--model", str(model), "--port", str(port), *flags]
    source = str(Path(kvgate.__file__).resolve().parent.parent)
    with TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env={**_environment(), "PYTHONPATH": source}
        )
        try:
            _await(process, port, log, engine)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _await(process: subprocess.Popen[bytes], port: int, log: object, engine: str) -> None:
    end = time.monotonic() + START
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    log.seek(0)  # type: ignore[attr-defined]
    said = log.read().decode("utf-8", "replace").strip().splitlines()[-1:]  # type: ignore[attr-defined]
    raise ValueError(f"engine {engine}: did not come up ({' '.join(said) or 'it said nothing'})")
