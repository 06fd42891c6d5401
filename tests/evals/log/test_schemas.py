"""The shipped JSON Schemas say of every file what the dataclass that reads and writes it says."""

from __future__ import annotations

import dataclasses
import json
from importlib.resources import files
from typing import Any

import jsonschema
import pytest

from kvgate.evals.judge.gates import Gate, load_gate
from kvgate.evals.leaderboard.evidence import RerunRecord
from kvgate.evals.log.manifest import Checks, Manifest, StopRecord
from kvgate.evals.log.records import SCHEMA_VERSION, CellRecord
from kvgate.evals.log.seal import Seal
from kvgate.evals.plan.config import UntilDecided
from kvgate.evals.run.early_stopping import RULES, EarlyStopping

TYPES = {
    "run": Manifest,
    "checks": Checks,
    "stop": StopRecord,
    "sample": CellRecord,
    "seal": Seal,
    "rerun": RerunRecord,
}


def schema(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((files("kvgate") / "configs" / "schemas" / f"{name}.schema.json").read_text())
    return found


@pytest.mark.parametrize("name", TYPES)
def test_fields_are_those_of_the_dataclass(name: str) -> None:
    said, fields = schema(name), dataclasses.fields(TYPES[name])
    assert set(said["properties"]) == {field.name for field in fields}
    needed = {field.name for field in fields if field.default is field.default_factory is dataclasses.MISSING}
    assert needed <= set(said["required"]), "what the reader cannot do without is required"
    assert said["additionalProperties"] is False
    assert said["properties"]["schema_version"] == {"const": SCHEMA_VERSION}


def test_every_schema_is_one_and_the_written_files_carry_one_version() -> None:
    names = [entry.name.removesuffix(".schema.json") for entry in (files("kvgate") / "configs" / "schemas").iterdir()]
    for name in names:
        jsonschema.Draft202012Validator.check_schema(schema(name))
    versioned = {name for name in names if "schema_version" in schema(name)["properties"]}
    assert versioned >= {*TYPES, "leaderboard", "canary"}


def test_the_rules_of_stopping_are_those_of_the_schema() -> None:
    assert set(schema("stop")["properties"]["rule"]["enum"]) == set(RULES)
    written = EarlyStopping(load_gate("screen"), UntilDecided(items=3), ["a" * 32] * 9).stop
    jsonschema.validate(json.loads(json.dumps(written)), schema("stop"))


def test_gate_files_are_the_gate() -> None:
    assert set(schema("gate")["properties"]) == {field.name for field in dataclasses.fields(Gate)}
