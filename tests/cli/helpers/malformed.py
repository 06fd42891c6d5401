"""Malformed inputs by the hundred: every field of every outside file with values of the wrong kind, raw texts, options.

A case is a name, what it writes under its folder, and the command line that is to refuse it.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

LONG = "x" * 5000
DEEP = 10_000
# One of each kind that a field may meet; which of them a field takes is said where the field is listed.
VALUES: dict[str, Any] = {
    "null": None, "true": True, "zero": 0, "negative": -1, "half": 0.5, "over": 5.5, "nan": float("nan"),
    "infinite": float("inf"), "huge": 10**30, "text": "x", "empty": "", "list": [1], "nested": [[["x"]]],
    "mapping": {"a": 1}, "date": datetime.date(2024, 2, 30 - 1),
}  # fmt: skip
JSON_VALUES = {key: value for key, value in VALUES.items() if key != "date"}


@dataclass(frozen=True)
class Case:
    """``files``: name -> bytes. ``words``: the command line, with ``{here}`` for the case's folder."""

    name: str
    words: tuple[str, ...]
    files: Mapping[str, bytes] = field(default_factory=dict)


def yaml_bytes(value: Any) -> bytes:
    text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
    return text.encode()


PLAN: dict[str, Any] = {
    "model": "embedded", "suites": [{"name": "retrieval", "counts": {512: 2}}],
    "policies": [{"policy": "streaming_llm", "budgets": [0.5]}],
}  # fmt: skip


def plan_case(name: str, plan: Any) -> Case:
    return Case(f"plan {name}", ("plan", "{here}/plan.yaml"), {"plan.yaml": yaml_bytes(plan)})


def plan_fields() -> Iterator[Case]:
    """Top-level keys. What `kvgate plan` takes for a model, which it does not load, is any text."""
    takes = {
        "name": {"text"}, "model": {"text"}, "revision": {"text", "null"}, "dtype": {"text"}, "gate": set[str](),
        "seed": {"zero"}, "page_size": set[str](), "prefill_chunk": set[str](), "batch_rows": set[str](),
        "pages": {"zero"}, "seeds": {"list"}, "primary": {"null"},
        "date": set[str](), "until_decided": {"null", "true"}, "suites": set[str](),
        "policies": set[str](),
    }  # fmt: skip
    for key, fine in takes.items():
        for kind, value in VALUES.items():
            if kind not in fine:
                yield plan_case(f"{key} {kind}", {**PLAN, key: value})


def suite_fields() -> Iterator[Case]:
    takes = {
        "name": set[str](), "counts": set[str](), "depths": set[str](), "tasks": set[str](),
        "options": {"mapping"}, "protocol": {"null"},
    }  # fmt: skip
    for key, fine in takes.items():
        for kind, value in VALUES.items():
            if kind not in fine and (key, kind) != ("depths", "list"):
                yield plan_case(f"suite {key} {kind}", {**PLAN, "suites": [{**PLAN["suites"][0], key: value}]})
    suite = PLAN["suites"][0]
    for name, suites in {
        "the same twice": [suite, suite],
        "twice by name and mapping": ["retrieval", suite],
        "overlapping lengths": [suite, {"name": "retrieval", "counts": {512: 9, 1024: 1}}],
        "a task twice": [{**suite, "tasks": ["single", "single"]}],
        "a depth twice": [{**suite, "depths": [0.5, 0.5]}],
        "depth 5.0": [{**suite, "depths": [5.0]}],
        "depth true": [{**suite, "depths": [True]}],
        "depth text": [{**suite, "depths": ["0.5"]}],
        "depth nan": [{**suite, "depths": [float("nan")]}],
        "length 0": [{**suite, "counts": {0: 1}}],
        "length text": [{**suite, "counts": {"long": 1}}],
        "length true": [{**suite, "counts": {True: 1}}],
        "length 1e12": [{**suite, "counts": {10**12: 1}}],
        "length 512.5": [{**suite, "counts": {512.5: 1}}],
        "length written twice": [{**suite, "counts": {"512": 1, 512: 2}}],
        "count true": [{**suite, "counts": {512: True}}],
        "count 1e12": [{**suite, "counts": {512: 10**12}}],
        "count 0.5": [{**suite, "counts": {512: 0.5}}],
        "count null": [{**suite, "counts": {512: None}}],
        "an unknown key": [{**suite, "count": {512: 1}}],
        "a number for a suite": [3],
        "null for a suite": [None],
        "many": ["retrieval"] * 100_000,
        "a name with a null byte": ["retrieval\0"],
        "an unknown module": ["no.such.module:Suite"],
        "a module without the class": ["json:Suite"],
        "a class that is no suite": ["json:JSONDecoder"],
        "a module with an empty name": [":Suite"],
        "relative": ["..:Suite"],
    }.items():
        yield plan_case(f"suites {name}", {**PLAN, "suites": suites})


def policy_fields() -> Iterator[Case]:
    takes: dict[str, set[str]] = {
        "policy": set(),
        "budgets": {"list"},
        "params": set(),
        "oracle": {"true"},
        "use": set(),
    }
    for key, fine in takes.items():
        for kind, value in VALUES.items():
            if kind not in fine:
                yield plan_case(f"policy {key} {kind}", {**PLAN, "policies": [{**PLAN["policies"][0], key: value}]})
    for kind, value in VALUES.items():
        if kind not in ("half",):
            policy = {**PLAN["policies"][0], "budgets": [value]}
            yield plan_case(f"budget {kind}", {**PLAN, "policies": [policy]})
    for name, budgets in {
        "1e30": [1e30], "-0.5": [-0.5], "text": ["0.5"], "twice": [0.5, 0.5], "many": [0.5] * 100_000, "1.5": [1.5],
        "too many tokens": [1 << 40],
    }.items():  # fmt: skip
        yield plan_case(f"budgets {name}", {**PLAN, "policies": [{**PLAN["policies"][0], "budgets": budgets}]})
    for name, params in {
        "sinks text": {"sinks": "4"}, "sinks 2.5": {"sinks": 2.5}, "sinks true": {"sinks": True},
        "sinks null": {"sinks": None}, "sinks list": {"sinks": [4]}, "positions 3": {"positions": 3},
        "positions other": {"positions": "moved"}, "unknown": {"zinks": 4}, "a number": 3, "a list": [3],
        "key 3": {3: 4}, "deep": {"sinks": {"a": {"b": 1}}}, "budget": {"budget": 3},
    }.items():  # fmt: skip
        yield plan_case(f"params {name}", {**PLAN, "policies": [{**PLAN["policies"][0], "params": params}]})
    for name in ("full", "magic", "json:JSONDecoder", "no.such:Policy", ":", "a:", ":b", "..:c", LONG, "x\0"):
        yield plan_case(f"policy called {name[:20]!r}", {**PLAN, "policies": [{"policy": name, "budgets": [0.5]}]})


def raw_texts() -> Iterator[tuple[str, bytes]]:
    """Texts that no YAML reader may choke on."""
    yield "nested lists", b"a: " + b"[" * DEEP + b"]" * DEEP
    yield "nested mappings", b"{a: " * DEEP + b"1" + b"}" * DEEP
    yield "nested blocks", "".join(f"{' ' * level}a:\n" for level in range(3000)).encode()
    yield "nested 100", b"a: " + b"[" * 100 + b"]" * 100
    yield "alias", b"a: &x [1]\nb: *x\n"
    layers = [b"a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    layers += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]".encode() for n in range(1, 12)]
    yield "billion laughs", b"\n".join(layers)
    yield "itself", b"a: &a [*a]\n"
    yield "tab", b"a:\n\t- b\n"
    yield "open", b"a: [1, 2\n"
    yield "null byte", b"name: \0\n"
    yield "binary", bytes(range(256))
    yield "not UTF-8", b"name: \xff\xfe\xfa\n"
    yield "UTF-16", "name: x\n".encode("utf-16")
    yield "empty", b""
    yield "only a comment", b"# nothing\n"
    yield "list", b"- a\n- b\n"
    yield "scalar", b"hello\n"
    yield "number", b"3\n"
    yield "key twice", b"name: a\nname: b\n"
    yield "list as key", b"? [1, 2]\n: 3\n"
    yield "mapping as key", b"? {a: 1}\n: 3\n"
    yield "python object", b"name: !!python/object/apply:os.system ['true']\n"
    yield "python name", b"name: !!python/name:os.system\n"
    yield "no such day", b"date: 2024-02-31\n"
    yield "bad float", b"seed: !!float x\n"
    yield "bad int", b"seed: !!int x\n"
    yield "bad bool", b"seed: !!bool x\n"
    yield "huge integer", b"seed: " + b"9" * 6000 + b"\n"
    yield "huge file", b"#" * (2 << 20)
    yield "two documents", b"name: a\n---\nname: b\n"
    yield "merge of text", b"<<: text\nname: b\n"
    yield "set", b"name: !!set {a, b}\n"
    yield "bytes", b"name: !!binary aGVsbG8=\n"
    yield "unknown key", b"nmae: x\n"
    yield "number as key", b"3: x\n"
    yield "null as key", b"~: x\n"
    yield "surrogate", b'name: "\\ud800"\n'


GATE: dict[str, Any] = {"m_suite": 0.03, "m_slice": 0.1}
READERS: dict[str, tuple[str, ...]] = {
    "plan": ("plan", "{here}/file.yaml"),
    "gate": ("plan", "quick", "--gate", "{here}/file.yaml"),
    "policy": ("plan", "{here}/use.yaml"),
    "lifecycle": ("replay", "small_chat", "--config", "{here}/file.yaml"),
    "serve": ("serve", "--model", "./nowhere", "--port", "0", "--config", "{here}/file.yaml"),
    "serve canary": ("serve", "--model", "./nowhere", "--port", "0", "--canary", "{here}/file.yaml"),
}


def raw_files() -> Iterator[Case]:
    for reader, words in READERS.items():
        for name, text in raw_texts():
            if reader == "lifecycle" and name in ("empty", "only a comment"):
                continue  # the defaults, which is said in `parse_config`
            files = {"file.yaml": text}
            if reader == "policy":
                files["use.yaml"] = yaml_bytes({**PLAN, "policies": [{"use": "FILE"}]})
            yield Case(f"{reader} as YAML: {name}", words, files)


GATE_FIELDS: dict[str, set[str]] = {
    "name": {"text"}, "m_suite": set(), "m_slice": {"half"}, "alpha": set(), "floor": {"half"},
    "floor_confidence": set(), "min_items": set(), "min_clusters": set(), "min_slice_clusters": set(),
    "slice_by": set(), "depth_bins": set(), "slice_alarm": {"half"}, "alarm_clusters": set(),
    "length_drift": {"half"}, "max_excluded": {"half", "zero"}, "shadow_only": set(),
    "canary_fraction": {"half", "zero"}, "suites": {"null"},
}  # fmt: skip


def gate_fields() -> Iterator[Case]:
    words = ("plan", "quick", "--gate", "{here}/gate.yaml")
    for key, fine in GATE_FIELDS.items():
        for kind, value in VALUES.items():
            if kind not in fine:
                yield Case(f"gate {key} {kind}", words, {"gate.yaml": yaml_bytes({**GATE, key: value})})
    for key in ("m_suite", "m_slice", "floor", "reason"):
        for kind, value in VALUES.items():
            if (key, kind) not in {("m_slice", "half"), ("floor", "half"), ("reason", "text")} and kind != "null":
                rule = {"reason": "because", key: value}
                yield Case(
                    f"gate suite {key} {kind}", words, {"gate.yaml": yaml_bytes({**GATE, "suites": {"code": rule}})}
                )


def lifecycle_fields() -> Iterator[Case]:
    from dataclasses import fields, is_dataclass

    from kvgate.lifecycle.config import ManagerConfig

    words = ("replay", "small_chat", "--config", "{here}/config.yaml")
    for spec in fields(ManagerConfig):
        default = getattr(ManagerConfig(), spec.name)
        inner = [f.name for f in fields(default)] if is_dataclass(default) else [None]
        for key in inner if spec.name != "tenants" else ["weight", "degrade", "page_quota", "min_share"]:
            for kind in ("true", "negative", "nan", "infinite", "huge", "text", "list", "mapping", "date"):
                value = VALUES[kind]
                if key == "degrade" and kind == "true":
                    continue
                if spec.name == "tenants":
                    settings: Any = {"tenants": {"a": {key: value}}}
                else:
                    settings = {spec.name: value if key is None else {key: value}}
                yield Case(f"lifecycle {spec.name}.{key} {kind}", words, {"config.yaml": yaml_bytes(settings)})


OWN_LINE = {"id": "a", "arrive_step": 0, "prompt_len": 10, "out_len": 5, "max_tokens": 5}
MOONCAKE_LINE = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}


def workloads() -> Iterator[Case]:
    def case(name: str, text: bytes, file: str = "w.jsonl") -> Case:
        return Case(f"workload {name}", ("replay", "{here}/" + file), {file: text})

    def lines(*rows: Any) -> bytes:
        return "".join(json.dumps(row) + "\n" for row in rows).encode()

    takes = {"id": {"text", "empty"}, "arrive_step": {"zero"}, "tenant": {"text"}, "cancel_at_step": {"zero", "null"},
             "priority": {"zero"}}  # fmt: skip
    for key in (*OWN_LINE, "tenant", "priority", "cancel_at_step"):
        for kind, value in JSON_VALUES.items():
            if kind not in takes.get(key, set()) - {"empty"}:
                yield case(f"{key} {kind}", lines({**OWN_LINE, key: value}))
    for key in MOONCAKE_LINE:
        for kind, value in JSON_VALUES.items():
            fine = {"timestamp": {"zero"}, "output_length": {"zero"}, "hash_ids": {"list"}}.get(key, set())
            if kind not in fine and not (key == "hash_ids" and kind == "empty"):
                yield case(f"mooncake {key} {kind}", lines({**MOONCAKE_LINE, key: value}))
    yield case("unknown key", lines({**OWN_LINE, "promt_len": 3}))
    yield case("mooncake unknown key", lines({**MOONCAKE_LINE, "x": 3}))
    yield case("both kinds", lines(OWN_LINE, MOONCAKE_LINE))
    yield case("the same id twice", lines(OWN_LINE, OWN_LINE))
    yield case("nested", b"[" * DEEP + b"]" * DEEP + b"\n")
    yield case("nested mappings", b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"\n")
    yield case("not JSON", b"{\n")
    yield case("a number", b"3\n")
    yield case("NaN", b'{"id": "a", "arrive_step": NaN, "prompt_len": 1, "out_len": 1, "max_tokens": 1}\n')
    yield case(
        "key twice", b'{"id": "a", "id": "b", "arrive_step": 0, "prompt_len": 1, "out_len": 1, "max_tokens": 1}\n'
    )
    yield case("huge integer", b'{"id": "a", "arrive_step": ' + b"9" * 6000 + b"}\n")
    yield case("not UTF-8", b"\xff\xfe{}\n")
    yield case("empty", b"")
    yield case("only newlines", b"\n\n\n")
    yield case("longer than the pool ever is", lines({**OWN_LINE, "prompt_len": 1 << 40}))
    yield case(
        "two lines in one by another separator",
        lines(OWN_LINE)[:-1] + "\u2028".encode() + lines({**OWN_LINE, "id": "b"}),
    )
    head = b"TIMESTAMP,ContextTokens,GeneratedTokens\n"
    for name, text in {
        "time zones mixed": head + b"2024-01-01 00:00:00+00:00,10,5\n2024-01-01 00:00:01,10,5\n",
        "time zones mixed the other way": head + b"2024-01-01 00:00:00,10,5\n2024-01-01 00:00:01+02:00,10,5\n",
        "no such day": head + b"2024-02-31 00:00:00,10,5\n",
        "a length of text": head + b"2024-01-01 00:00:00,ten,5\n",
        "a length of 0": head + b"2024-01-01 00:00:00,0,5\n",
        "a huge length": head + b"2024-01-01 00:00:00," + b"9" * 6000 + b",5\n",
        "a length over all limits": head + b"2024-01-01 00:00:00,10000000000000,5\n",
        "other columns": b"a,b,c\n1,2,3\n",
        "too few columns": head + b"2024-01-01 00:00:00,10\n",
        "no rows": head,
        "a huge field": head + b"2024-01-01 00:00:00,10," + b"x" * 300_000 + b"\n",
        "null bytes": head + b"\0,\0,\0\n",
    }.items():
        yield case(f"azure {name}", text, "w.csv")


def options() -> Iterator[Case]:
    """Numbers of commands that nothing may run or be allocated by."""
    bad = {"nan": "nan", "infinite": "inf", "negative": "-1", "huge": "1" + "0" * 30, "text": "many", "empty": ""}
    run = ("run", "--model", "./nowhere", "--out", "{here}/r")
    numbers: dict[tuple[str, ...], str] = {
        ("replay", "small_chat"): "--blocks --cache-blocks --watermark --ttft-bound --seed",
        ("power",): "--discordance --cluster-size --suites --slices --power --cap",
        ("prove", "--out", "{here}/prove"): "--replicates --cap --batch --alpha --seed",
        ("plan", "quick"): "--power --discordance --cluster-size --cap",
        ("metrics", "--once"): "--blocks",
        ("metrics",): "--port --seconds",
        ("metrics", "--model", "./nowhere"): "--requests --blocks",
        run: "--seed --max-items --max-minutes",
        (*run, "--until-decided"): "--max-items --max-minutes",
        ("lm-eval", "--tasks", "x", "--policy", "h2o@0.5", "--out", "{here}/r"): "--limit --num-fewshot --batch-rows",
    }  # fmt: skip
    for words, names in numbers.items():
        for name in names.split():
            for kind, text in bad.items():
                prefix = ("--policy", "lru") if name == "--cache-blocks" else ()
                prefix = ("--policy", "fcfs") if name == "--watermark" else prefix
                prefix = ("--power", "0.9") if words[0] == "plan" and name != "--power" else prefix
                yield Case(f"{words[0]} {name} {kind} {len(words)}", (*words, *prefix, f"{name}={text}"))
    for text in ("h2o", "@0.5", "h2o@", "h2o@x", "h2o@0", "h2o@-1", "h2o@nan", "h2o@inf", "h2o@1e30", "h2o@0.5,0.5",
                 "h2o@²", "full@0.5", f"{LONG}@0.5", "h2o@" + "9" * 6000):  # fmt: skip
        yield Case(f"run --policy {text[:20]}", (*run, "--policy", text))
    for text in ("", ",", "1,x", "-1,2", "1,1", "1" * 6000, "nan", "1;2"):
        yield Case(f"run --seeds {text[:20]!r}", (*run, "--seeds", text))


def paths() -> Iterator[Case]:
    """Names too long for a file, null bytes, folders where files are expected and the other way round."""
    readers: dict[str, tuple[str, ...]] = {
        "plan": ("plan", "PATH"), "run --plan": ("run", "--plan", "PATH", "--out", "{here}/r"),
        "gate file": ("plan", "quick", "--gate", "PATH"), "replay": ("replay", "PATH"),
        "replay --config": ("replay", "small_chat", "--config", "PATH"),
        "metrics --config": ("metrics", "--once", "--config", "PATH"),
        "gate": ("gate", "PATH"), "show": ("show", "PATH"), "report": ("report", "PATH"), "verify": ("verify", "PATH"),
        "rerun": ("rerun", "PATH", "--policy", "h2o@0.5"), "canary": ("canary", "PATH", "--policy", "h2o@0.5"),
        "run --model": ("run", "--model", "PATH", "--out", "{here}/r"),
    }  # fmt: skip
    bad = {"too long": LONG, "too long for yaml": LONG + ".yaml", "null byte": "a\0b", "null byte.yaml": "a\0b.yaml",
           "folder": "{here}", "folder.yaml": "{here}/folder.yaml", "nowhere": "{here}/nowhere",
           "under a file": "{here}/file.yaml/x.yaml", "empty": ""}  # fmt: skip
    files = {"file.yaml": b"x", "folder.yaml/inside": b"x"}
    for reader, words in readers.items():
        for kind, path in bad.items():
            yield Case(f"path of {reader}: {kind}", tuple(path if word == "PATH" else word for word in words), files)
    writers: dict[str, tuple[str, ...]] = {
        "replay --json": ("replay", "small_chat", "--json", "PATH"),
        "prove": ("prove", "--replicates", "2", "--cap", "40", "--out", "PATH"),
        "run": ("run", "--model", "./nowhere", "--out", "PATH"),
    }  # fmt: skip
    for writer, words in writers.items():
        for kind in ("too long", "null byte", "under a file"):
            path = bad[kind]
            yield Case(f"output of {writer}: {kind}", tuple(path if word == "PATH" else word for word in words), files)
        path = "/proc/kvgate/x"
        yield Case(
            f"output of {writer}: not writable", tuple(path if word == "PATH" else word for word in words), files
        )
    yield Case("output of replay --json: folder", ("replay", "small_chat", "--json", "{here}"), files)
    yield Case(
        "output of prove: file", ("prove", "--replicates", "2", "--cap", "40", "--out", "{here}/file.yaml"), files
    )


def record_fields(line: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """A record's line with a value of the wrong kind in one field, or a field too many or too few."""
    for key in line:
        for kind, value in JSON_VALUES.items():
            if value != line[key] or type(value) is not type(line[key]):
                yield f"{key} {kind}", {**line, key: value}
        yield f"without {key}", {name: value for name, value in line.items() if name != key}
    turn = line["turns"][0]
    for key in turn:
        for kind, value in JSON_VALUES.items():
            if value != turn[key] or type(value) is not type(turn[key]):
                yield f"turn {key} {kind}", {**line, "turns": [{**turn, key: value}]}
    yield "an unknown key", {**line, "colour": "red"}


def document_fields(document: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """A small file with a value of the wrong kind in one field, and files that are no mapping at all."""
    for key in document:
        for kind, value in JSON_VALUES.items():
            if value != document[key] or type(value) is not type(document[key]):
                yield f"{key} {kind}", {**document, key: value}
        yield f"without {key}", {name: value for name, value in document.items() if name != key}
    for kind, value in JSON_VALUES.items():
        if not isinstance(value, dict):
            yield f"{kind} as a whole", value
    yield "an unknown key", {**document, "colour": "red"}


def all_cases() -> list[Case]:
    """Everything that needs no finished run."""
    makers = (
        plan_fields,
        suite_fields,
        policy_fields,
        raw_files,
        gate_fields,
        lifecycle_fields,
        workloads,
        options,
        paths,
    )
    return [case for maker in makers for case in maker()]


def write(case: Case, here: Path) -> list[str]:
    """Write the case's files and return its command line."""
    for name, data in case.files.items():
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_bytes(
            data.replace(b"FILE", str(here / "file.yaml").encode()) if name == "use.yaml" else data
        )
    return [word.replace("{here}", str(here)) for word in case.words]
