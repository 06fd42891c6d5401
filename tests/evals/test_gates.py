"""Gate files: the shipped ones, and what is refused."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest
import yaml

from kvgate.evals.judge.gates import gate_names, load_gate, parse_gate

GOOD = "m_suite: 0.03\nm_slice: 0.1\n"


def test_shipped_gates_load_and_match_their_schema() -> None:
    schema = json.loads((files("kvgate") / "configs" / "schemas" / "gate.schema.json").read_text(encoding="utf-8"))
    assert gate_names() == ["production", "screen", "strict"]
    for name in gate_names():
        text = (files("kvgate") / "configs" / "gates" / f"{name}.yaml").read_text(encoding="utf-8")
        jsonschema.validate(yaml.safe_load(text), schema)
        assert load_gate(name).name == name


def test_shipped_margins() -> None:
    screen, production, strict = (load_gate(name) for name in ("screen", "production", "strict"))
    assert (production.m_suite, production.m_slice, strict.m_suite) == (0.03, 0.10, 0.01)
    assert screen.m_suite > production.m_suite
    assert screen.shadow_only
    assert screen.canary_fraction == 0.0
    assert not production.shadow_only
    assert all(gate.alpha == 0.05 and gate.length_drift == 0.1 for gate in (screen, production, strict))


def test_suite_rules_override() -> None:
    gate = parse_gate(GOOD + "suites: {code: {m_suite: 0.05, floor: 0.5, reason: few files}}", "mine")
    assert (gate.m_suite_of("code"), gate.m_slice_of("code"), gate.floor_of("code")) == (0.05, 0.1, 0.5)
    assert (gate.m_suite_of("retrieval"), gate.floor_of("retrieval")) == (0.03, 0.6)


def test_depth_bins() -> None:
    gate = parse_gate(GOOD, "mine")
    bins = [gate.depth_bin(depth) for depth in (None, 0.0, 0.25, 0.5, 0.75, 1.0)]
    assert bins == [None, "0-0.2", "0.2-0.4", "0.4-0.6", "0.6-0.8", "0.8-1"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("m_suite: 0.03", ["m_slice", "missing"]),
        (GOOD + "margin: 1", ["margin", "unknown key"]),
        ("m_suite: 0\nm_slice: 0.1", ["m_suite", "0"]),
        ("m_suite: -0.1\nm_slice: 0.1", ["m_suite", "-0.1"]),
        ("m_suite: 0.2\nm_slice: 0.1", ["m_slice", "0.1", "at least m_suite"]),
        ("m_suite: 0.2\nm_slice: 0.7", ["m_slice", "0.7", "floor"]),
        ("m_suite: lots\nm_slice: 0.1", ["m_suite", "lots"]),
        ("m_suite: .nan\nm_slice: 0.1", ["m_suite", "nan"]),
        (GOOD + "alpha: 0", ["alpha", "0"]),
        (GOOD + "alpha: 0.5", ["alpha", "0.5"]),
        (GOOD + "floor: 0", ["floor", "0"]),
        (GOOD + "floor_confidence: 1.0", ["floor_confidence", "1"]),
        (GOOD + "min_items: 0", ["min_items", "0"]),
        (GOOD + "min_items: 2.5", ["min_items", "2.5"]),
        (GOOD + "slice_by: [colour]", ["slice_by", "colour"]),
        (GOOD + "slice_by: [length, length]", ["slice_by", "once"]),
        (GOOD + "slice_by: length", ["slice_by"]),
        (GOOD + "shadow_only: true", ["canary_fraction", "shadow_only"]),
        (GOOD + "shadow_only: 1", ["shadow_only"]),
        (GOOD + "canary_fraction: 1.5", ["canary_fraction", "1.5"]),
        (GOOD + "suites: [code]", ["suites", "code"]),
        (GOOD + "suites: {code: {m_suite: 0.05}}", ["suites.code.reason"]),
        (GOOD + "suites: {code: {m_suite: 0.05, reason: ' '}}", ["suites.code.reason"]),
        (GOOD + "suites: {code: {colour: 1, reason: why}}", ["suites.code", "'colour'"]),
        (GOOD + "suites: {code: {m_slice: 0.9, reason: why}}", ["suites.code.m_slice", "0.9"]),
        ("[1, 2]", ["mapping"]),
        ("a: [", ["not YAML"]),
        ("name: ''\n" + GOOD, ["name"]),
    ],
)
def test_nonsense_is_named(text: str, names: list[str]) -> None:
    with pytest.raises(ValueError, match="gate") as caught:
        parse_gate(text, "mine")
    message = str(caught.value)
    assert "\n" not in message
    for name in names:
        assert name in message


def test_unknown_gate_and_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="production, screen, strict"):
        load_gate("lenient")
    with pytest.raises(ValueError, match="no such file"):
        load_gate(tmp_path / "none.yaml")
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD, encoding="utf-8")
    assert load_gate(path).name == "mine"
