"""What rollout tools are given, checked with their own schemas and, where they are installed, by the tools."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from canary_file import canary_data
from referencing import Registry, Resource

from kvgate.cli.main import main
from kvgate.serving.canary.settings import parse_canary
from kvgate.serving.rollout.formats import render

SCHEMAS = Path(__file__).resolve().parents[3] / "shared" / "schemas"
with_schemas = pytest.mark.skipif(not SCHEMAS.is_dir(), reason=f"{SCHEMAS}, the tools' own schemas, is not there")
VERSIONS = {"Rollout": "v1alpha1", "AnalysisTemplate": "v1alpha1", "Canary": "v1beta1", "MetricTemplate": "v1beta1"}


def files(format: str, **changes: Any) -> Mapping[str, str]:
    return render(parse_canary(canary_data(**changes)), format)


def closed(schema: Any) -> Any:
    """The schema with unknown fields refused, as the API server's strict validation does."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    open_ended = made.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in made
    if isinstance(made.get("properties"), dict) and "type" in made and not open_ended:
        made["additionalProperties"] = False
    return made


def valid(manifest: dict[str, Any]) -> None:
    kind = manifest["kind"]
    found = json.loads((SCHEMAS / f"{kind}.{VERSIONS[kind]}.json").read_text())
    assert manifest["apiVersion"] == f"{found['group']}/{found['version']}"
    bare = {key: value for key, value in manifest.items() if key != "metadata"}
    schema = closed(found["schema"])
    schema["properties"].setdefault("metadata", {})
    jsonschema.validate({**bare, "metadata": {}}, schema)


@with_schemas
@pytest.mark.parametrize("format", ["argo", "flagger"])
def test_manifests_are_valid_for_the_tools(format: str) -> None:
    (text,) = files(format).values()
    manifests = list(yaml.safe_load_all(text))
    assert {m["kind"] for m in manifests} in ({"Rollout", "AnalysisTemplate"}, {"Canary", "MetricTemplate"})
    for manifest in manifests:
        valid(manifest)


@with_schemas
def test_the_check_finds_what_it_is_for() -> None:
    (text,) = files("argo").values()
    _, rollout = yaml.safe_load_all(text)
    for change in (
        lambda m: m["spec"].update(replicas="four"),
        lambda m: m["spec"]["strategy"]["canary"]["steps"][0].update(setWeigth=5),
    ):
        broken = copy.deepcopy(rollout)
        change(broken)
        with pytest.raises(jsonschema.ValidationError):
            valid(broken)


def test_argo_pauses_unless_a_limit_says_so() -> None:
    (text,) = files("argo").values()
    template, rollout = yaml.safe_load_all(text)
    metrics = {metric["name"]: metric for metric in template["spec"]["metrics"]}
    assert set(metrics) == {
        "quality-loss", "failures", "allocation-failures", "preemptions", "recomputed-tokens", "slow-first-token",
        "slow-between-tokens",
    }  # fmt: skip
    for metric in metrics.values():
        assert metric["failureCondition"] == "len(result) > 0 && result[0] < 0"
        assert metric["successCondition"] == "len(result) > 0 && result[0] > 0"
    query = metrics["quality-loss"]["provider"]["prometheus"]["query"]
    assert "(-kvgate_canary_quality_difference_lower" in query.split("<")[0], "success: the loss's upper limit"
    assert "(-kvgate_canary_quality_difference_upper" in query.split(" - ")[1], "failure: the loss's lower limit"
    weights = [step["setWeight"] for step in rollout["spec"]["strategy"]["canary"]["steps"] if "setWeight" in step]
    assert weights == [1, 5, 25]


def test_flagger_says_what_it_cannot() -> None:
    (text,) = files("flagger").values()
    assert text.startswith("# Flagger cannot pause on missing data")


@pytest.mark.parametrize("format", ["argo", "flagger"])
def test_a_verdict_for_shadows_only_gets_no_traffic(format: str) -> None:
    with pytest.raises(ValueError, match="shadows only"):
        files(format, mode="shadow", traffic_fraction=0.0)


@with_schemas
@pytest.mark.parametrize("mode", ["canary", "shadow"])
def test_flags_are_valid(mode: str) -> None:
    (text,) = files("flagd", mode=mode, traffic_fraction=0.05 if mode == "canary" else 0.0).values()
    schemas = [json.loads((SCHEMAS / name).read_text()) for name in ("flagd-flags.json", "flagd-targeting.json")]
    registry: Any = Registry()
    for schema in schemas:
        # Draft 7 ignores an $id beside a $ref, so relative references stay relative.
        for name in (schema["$id"], f"./{schema['$id'].rpartition('/')[2]}"):
            registry = registry.with_resource(name, Resource.from_contents(schema))
    jsonschema.Draft7Validator(schemas[0], registry=registry).validate(json.loads(text))


@pytest.mark.parametrize(("fraction", "low", "high"), [(0.05, 70, 130), (0.0, 0, 0)])
def test_the_flag_provider_splits_as_it_should(tmp_path: Path, fraction: float, low: int, high: int) -> None:
    pytest.importorskip("openfeature.contrib.provider.flagd", reason="pip install openfeature-provider-flagd")
    from openfeature import api
    from openfeature.contrib.provider.flagd import FlagdProvider
    from openfeature.contrib.provider.flagd.config import ResolverType
    from openfeature.evaluation_context import EvaluationContext

    (text,) = files("flagd", traffic_fraction=fraction).values()
    path = tmp_path / "flags.json"
    path.write_text(text)
    provider = FlagdProvider(resolver_type=ResolverType.FILE, offline_flag_source_path=str(path))
    api.set_provider_and_wait(provider)
    try:
        client = api.get_client()

        def value(i: int) -> str:
            return client.get_string_value(
                "kvgate-policy", "none", EvaluationContext(targeting_key=f"conversation-{i}")
            )

        values = [value(i) for i in range(2000)]
        assert set(values) <= {"full", "h2o@0.5"}
        assert low <= values.count("h2o@0.5") <= high
        assert values[:50] == [value(i) for i in range(50)], "a conversation stays where it is"
    finally:
        api.shutdown()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: apt-get install prometheus")
def test_promtool_takes_the_rules_and_their_tests_pass(tmp_path: Path) -> None:
    for name, text in files("prometheus").items():
        (tmp_path / name).write_text(text)
    for words in (["check", "rules", "kvgate-canary.rules.yaml"], ["test", "rules", "kvgate-canary.tests.yaml"]):
        done = subprocess.run(["promtool", *words], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_query_names_a_metric_of_the_server(tmp_path: Path) -> None:
    """What the files ask for is what ``/metrics`` has."""
    import re

    from prometheus_client import CollectorRegistry

    from kvgate.serving.canary.progress import Progress
    from kvgate.serving.metrics import ArmMetrics, CanaryMetrics

    canary = parse_canary(canary_data())
    registry = CollectorRegistry()
    ArmMetrics(registry)
    registry.register(CanaryMetrics(Progress(canary.judge), canary.label))
    known = {sample for family in registry.collect() for sample in (family.name, f"{family.name}_total")}
    known |= {f"{family.name}_bucket" for family in registry.collect()}
    for format in ("argo", "flagger", "prometheus", "grafana"):
        for text in render(canary, format).values():
            asked = set(re.findall(r"kvgate_[a-z_]+", text))
            assert asked
            assert asked <= known


def test_a_dashboard_has_the_parts_that_grafana_asks_for() -> None:
    (text,) = files("grafana").values()
    found = json.loads(text)
    assert found["schemaVersion"] >= 36
    ids = [panel["id"] for panel in found["panels"]]
    assert len(set(ids)) == len(ids) == 8
    for panel in found["panels"]:
        assert {"type", "title", "gridPos", "targets", "datasource"} <= set(panel)
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_the_command_line_converts_an_emitted_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "h2o.yaml"
    path.write_text(yaml.safe_dump(canary_data()))
    for format in ("argo", "flagger", "flagd", "prometheus", "grafana"):
        assert main(["canary", str(path), "--format", format, "--out", str(tmp_path / "out")]) == 0
    written = {Path(line).name for line in capsys.readouterr().out.splitlines()}
    assert written == {path.name for path in (tmp_path / "out").iterdir()}
    path.write_text(yaml.safe_dump(canary_data(mode="shadow", traffic_fraction=0.0)))
    assert main(["canary", str(path), "--format", "argo", "--out", str(tmp_path / "out")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
