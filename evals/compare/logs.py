"""Logs of two evaluations, or one file of pairs, into pairs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvgate.evals.compare.judge import ScoredPair
from kvgate.evals.compare.readers import inspect_ai, lm_eval, plain
from kvgate.evals.compare.readers.side import Side, joined


def read_logs(paths: Sequence[Path], metric: str | None = None) -> list[ScoredPair]:
    """Pairs from one file that has both scores, or from the exact and the candidate's log.

    ValueError for other numbers of paths, files that cannot be told or read, and sides that do not match.
    """
    if len(paths) not in (1, 2):
        raise ValueError(f"--logs: {len(paths)} given; give one file of pairs, or the exact log and the candidate's")
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path}: no such file or folder")
    if len(paths) == 1:
        if _kind(paths[0]) != "plain":
            raise ValueError(f"{paths[0]}: holds one side; give the candidate's log as well")
        return plain.read_pairs(paths[0])
    kinds = [_kind(path) for path in paths]
    if kinds[0] != kinds[1]:
        raise ValueError(f"{paths[1]}: is a log of another kind than {paths[0]} ({kinds[1]}, {kinds[0]})")
    exact, candidate = (_side(path, kinds[0], metric) for path in paths)
    return joined(exact, candidate, (str(paths[0]), str(paths[1])))


def _kind(path: Path) -> str:
    if path.suffix in {".eval", ".json"} and path.is_file():
        return "inspect_ai"
    if lm_eval.is_samples(path):
        return "lm-eval"
    if path.suffix in {".csv", ".jsonl"} and path.is_file():
        return "plain"
    raise ValueError(
        f"{path}: no log of a known kind; give a .csv or .jsonl of scores, lm-eval's samples_*.jsonl or their folder, "
        "or inspect_ai's .eval or .json"
    )


def _side(path: Path, kind: str, metric: str | None) -> Side:
    if kind == "lm-eval":
        return lm_eval.read_samples(path, metric)
    return inspect_ai.read_log(path, metric) if kind == "inspect_ai" else plain.read_side(path)
