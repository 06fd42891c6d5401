"""``kvgate metrics --model``: a real engine under the serving loop, seen through its metrics."""

from __future__ import annotations

import argparse

import pytest

from kvgate.cli import engine_metrics as metrics_cli
from kvgate.engine.embedded import embedded_folder


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    metrics_cli.add_parser(parser.add_subparsers())
    return parser.parse_args(["metrics", *words])


@pytest.mark.slow
def test_a_running_engine_shows_its_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        embedded_folder()
    except ValueError as error:
        pytest.skip(f"the embedded model is not there: {error}")
    args = arguments("--model", "embedded", "--workload", "small_chat", "--requests", "3", "--blocks", "60", "--once")
    assert args.run(args) == 0
    text = capsys.readouterr().out
    assert 'state="finished"' in text
    assert 'kvgate_prefix_blocks_total{event="inserted"}' in text
    assert 'kvgate_blocks{use="total"} 60.0' in text


def test_without_a_model_the_simulator_drives_the_manager(capsys: pytest.CaptureFixture[str]) -> None:
    args = arguments("--once", "--workload", "small_chat")
    assert args.run(args) == 0
    assert "kvgate_tokens_computed_total" in capsys.readouterr().out
    wrong = arguments("--model", "./nowhere", "--requests", "1")
    with pytest.raises(ValueError, match="no such folder"):
        wrong.run(wrong)
