"""A running server over a tiny model, and helpers to talk to it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent / "helpers"))

from live_server import Live, tiny_chat_model

from kvgate.engine.models import LoadedModel, load_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(str(tiny_chat_model(tmp_path_factory.mktemp("tiny"))), dtype="float32")


@pytest.fixture(scope="module")
def live(tiny: LoadedModel) -> Iterator[Live]:
    with Live(tiny) as running:
        yield running
        running.audit()
