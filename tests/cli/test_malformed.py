"""Malformed inputs, well over a thousand: each is refused in one line with exit code 2, quickly, and writes nothing.

Wrong values in every field of plans, gates, lifecycle settings, workloads, traces, records and the small files of a
run; texts that are no YAML or JSON; numbers and paths of the command line. What is accepted on purpose comes last.
"""

from __future__ import annotations

import json
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import malformed
import pytest
import yaml
from made_run import MadeRun
from tiny_model import save_tiny_model

from kvgate.cli.main import main
from kvgate.evals.log.names import CHECKS, MANIFEST, SAMPLES, SEAL, STOP
from kvgate.evals.log.run_folder import write_json
from kvgate.evals.run.prepare import prepare  # noqa: F401  # brings torch in before any alarm is set
from kvgate.lifecycle import config as lifecycle_config

SECONDS = 30  # more is a hang
CASES = malformed.all_cases()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In a folder of its own, with an alarm."""
    monkeypatch.chdir(tmp_path)

    def ring(*_: object) -> None:
        raise AssertionError(f"still at it after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def contents(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*"))}


def assert_refused(words: list[str], here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(here)
    assert main(words) == 2
    said = capsys.readouterr()
    (line,) = said.err.strip().splitlines()
    assert line.startswith("kvgate: ")
    assert len(line) < 1000
    assert said.out == ""
    assert contents(here) == before


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_refused_in_one_line(case: malformed.Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(malformed.write(case, tmp_path), tmp_path, capsys)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("malformed")
    run = MadeRun(save_tiny_model(folder / "model")).save(folder / "run", {0.5: 0}, items=2)
    assert main(["gate", str(run)]) == 0
    return run


def copied(done: Path, folder: Path) -> Path:
    shutil.copytree(done, folder / "run")
    return folder / "run"


def test_records_with_a_wrong_value_in_any_field(
    done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is refused for what it says, before its seal is looked at, or by the seal where the value could be right."""
    folder = copied(done, tmp_path)
    lines = (folder / SAMPLES).read_text().splitlines()
    kinds: Counter[str] = Counter()
    for name, row in malformed.record_fields(json.loads(lines[1])):
        (folder / SAMPLES).write_text("\n".join([lines[0], json.dumps(row), *lines[2:]]) + "\n")
        assert main(["gate", str(folder)]) == 2, name
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert line.startswith("kvgate: ")
        assert len(line) < 1000
        kinds["line 2" if "line 2" in line else "seal" if "seal.json" in line else "other"] += 1
    assert kinds.total() > 400
    assert kinds["line 2"] > 350
    for raw in (
        b"[" * malformed.DEEP,
        b'{"a":' * malformed.DEEP,
        b"{",
        b"3",
        b"null",
        b"\xff",
        b"\0",
        b'{"a": NaN}',
        b"",
    ):
        (folder / SAMPLES).write_bytes(lines[0].encode() + b"\n" + raw + b"\n")
        assert_refused(["gate", str(folder)], folder, capsys)


@pytest.mark.parametrize("name", [MANIFEST, CHECKS, SEAL])
def test_the_small_files_with_a_wrong_value_in_any_field(
    done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    folder = copied(done, tmp_path)
    document = json.loads((folder / name).read_text())
    cases = list(malformed.document_fields(document))
    for inner in ("provenance", "identity", "plan") if name == MANIFEST else ():
        cases += [
            (f"{inner}.{case}", {**document, inner: changed})
            for case, changed in malformed.document_fields(document[inner])
        ]
    assert len(cases) > (200 if name == MANIFEST else 30)
    for case, changed in cases:
        (folder / name).write_text(json.dumps(changed))
        assert main(["gate", str(folder)]) == 2, case
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert line.startswith("kvgate: ")
        assert len(line) < 1000, line


def test_a_stop_file_with_a_wrong_value_in_any_field(
    done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copied(done, tmp_path)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["plan"]["until_decided"] = {"items": None, "minutes": None}
    write_json(folder / MANIFEST, manifest)
    stop = {"schema_version": 2, "rule": "decided", "reason": "every question was settled", "items": 2, "planned": 2,
            "looks": 1, "open": [], "deterministic": True}  # fmt: skip
    for _, changed in malformed.document_fields(stop):
        (folder / STOP).write_text(json.dumps(changed))
        assert_refused(["gate", str(folder)], folder, capsys)


RAW_JSON = [
    b"", b"{", b"[]", b"3", b"null", b'"x"', b"\xff\xfe", b"\0", b"[" * 10_000, b'{"a":' * 10_000, b'{"a": NaN}',
    b'{"a": 1, "a": 2}', b"9" * 6000, "{}".encode("utf-16"), b'{"schema_version": 1e400}',
]  # fmt: skip


@pytest.mark.parametrize("name", [MANIFEST, CHECKS, SEAL, "leaderboard.json"])
def test_files_that_are_no_json(done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    folder = copied(done, tmp_path)
    command = "show" if name == "leaderboard.json" else "gate"
    for raw in RAW_JSON:
        (folder / name).write_bytes(raw)
        assert_refused([command, str(folder)], folder, capsys)
    (folder / name).unlink()
    (folder / name).mkdir()
    assert_refused([command, str(folder)], folder, capsys)


def test_there_are_as_many_cases_as_the_changelog_says() -> None:
    assert len(CASES) >= 1700
    assert len({case.name for case in CASES}) == len(CASES)


def test_limits_name_settings_that_exist() -> None:
    names = {name for name, _ in lifecycle_config._numbers(lifecycle_config.ManagerConfig())}
    assert lifecycle_config.LIMITS.keys() <= names


# -- accepted on purpose ----------------------------------------------------------------------------------------------


def test_a_byte_order_mark_is_dropped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark = b"\xef\xbb\xbf"
    (tmp_path / "plan.yaml").write_bytes(mark + malformed.yaml_bytes(malformed.PLAN))
    assert main(["plan", "plan.yaml"]) == 0
    (tmp_path / "gate.yaml").write_bytes(mark + malformed.yaml_bytes({"name": "mine", **malformed.GATE}))
    assert main(["plan", "plan.yaml", "--gate", "gate.yaml"]) == 0
    (tmp_path / "w.jsonl").write_bytes(mark + json.dumps(malformed.OWN_LINE).encode() + b"\n")
    assert main(["replay", "w.jsonl", "--config", "config.yaml"]) == 2
    (tmp_path / "config.yaml").write_bytes(mark + b"page_size: 32\n")
    assert main(["replay", "w.jsonl", "--config", "config.yaml"]) == 0
    table = (
        b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n2024-01-01 00:00:00+01:00,10,5\r\n2024-01-01 00:00:01Z,10,5\r\n"
    )
    (tmp_path / "w.csv").write_bytes(mark + table)
    assert main(["replay", "w.csv"]) == 0


def test_line_separators_inside_a_text_do_not_end_a_line(tmp_path: Path) -> None:
    """JSON allows U+2028 and U+0085 inside texts; ``str.splitlines`` would cut there."""
    row = {**malformed.OWN_LINE, "id": "a\u2028b\u0085c"}
    (tmp_path / "w.jsonl").write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="utf-8")
    assert main(["replay", "w.jsonl"]) == 0


def test_an_empty_settings_file_means_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("# nothing\n")
    assert main(["replay", "small_chat", "--config", "config.yaml"]) == 0


def test_a_later_arrival_than_anybody_waits_for_costs_nothing(tmp_path: Path) -> None:
    rows = [malformed.OWN_LINE, {**malformed.OWN_LINE, "id": "b", "arrive_step": 1 << 50}]
    (tmp_path / "w.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["replay", "w.jsonl"]) == 0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


TOO_MUCH: dict[str, Any] = {
    "pages for more memory than there is": ({"pages": (1 << 31) - 1, "page_size": 32}, "GiB"),
    "an option of another type": (
        {"suites": [{"name": "fidelity", "options": {"new_tokens": "6"}}]}, "new_tokens is '6'; give a whole number",
    ),
    "an option that is a bool": (
        {"suites": [{"name": "fidelity", "options": {"new_tokens": True}}]}, "new_tokens is True",
    ),
    "an option of 1e12": ({"suites": [{"name": "fidelity", "options": {"new_tokens": 10**12}}]}, "new_tokens is 1000"),
    "an option that is a list": ({"suites": [{"name": "code", "options": {"folder": ["x"]}}]}, "give a text"),
    "an unknown option": ({"suites": [{"name": "code", "options": {"foldr": "x"}}]}, "unknown option 'foldr'"),
    "a length that no model has": ({"suites": [{"name": "retrieval", "counts": {100_000: 1}}]}, "positions"),
    "sinks under 0": ({"policies": [{"policy": "streaming_llm", "params": {"sinks": -1}, "budgets": [0.5]}]}, "sinks"),
    "sinks over the budget": (
        {"policies": [{"policy": "streaming_llm", "params": {"sinks": 10**12}, "budgets": [64]}]}, "no window",
    ),
    "recent under 0": ({"policies": [{"policy": "h2o", "params": {"recent": -3}, "budgets": [0.5]}]}, "recent"),
}  # fmt: skip


@pytest.mark.parametrize("change, says", TOO_MUCH.values(), ids=TOO_MUCH.keys())
def test_what_only_the_model_can_refuse(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], says: str
) -> None:
    plan = {
        **malformed.PLAN,
        "model": str(tiny),
        "dtype": "float32",
        "suites": [{"name": "retrieval", "counts": {400: 1}}],
    }
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump({**plan, **change}))
    capsys.readouterr()
    assert main(["run", "--plan", "plan.yaml", "--out", "r"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert says in line
    assert not (tmp_path / "r").exists()
