"""``kvgate lm-eval``: tasks of lm-eval, run exact and under every policy, judged like any other run.

A task is a suite, a document an item, and its score the task's own metric on that document. lm-eval's evaluation runs
once for each configuration, over the same answers; documents are paired by lm-eval's own hashes.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from kvgate.engine.models import load_model
from kvgate.evals.data.items import digest
from kvgate.evals.judge.gates import load_gate
from kvgate.evals.leaderboard.finished import load_run
from kvgate.evals.lm_eval.bench import Bench, Settings
from kvgate.evals.lm_eval.items import MADE_BY, Origin
from kvgate.evals.lm_eval.model import KvgateLM
from kvgate.evals.lm_eval.records import Scored, records_of
from kvgate.evals.log.names import CHECKS, LEADERBOARD, MANIFEST, SAMPLES, SEAL
from kvgate.evals.log.records import EXACT, SCHEMA_VERSION
from kvgate.evals.log.run_folder import read_json, write_json, write_seal, write_text
from kvgate.evals.plan.cells import configurations
from kvgate.evals.plan.config import RunConfig, SuiteChoice
from kvgate.evals.run.identity import identity
from kvgate.evals.run.prepare import described, items_hash
from kvgate.evals.run.provenance import provenance
from kvgate.evals.run.self_checks import run_checks


@dataclass(frozen=True)
class LmEvalOptions:
    """How lm-eval is asked.

    Attributes:
        include_path: folder with task YAML files of one's own. ``limit``: first documents of each task; None for all.
        fewshot: examples in the prompt; None is the task's own number. ``chat``: apply the model's chat template.
        metric: ``NAME`` or ``NAME,FILTER``, as in lm-eval's tables; None is each task's first that is best when high.
    """

    include_path: Path | None = None
    limit: int | None = None
    fewshot: int | None = None
    chat: bool = False
    metric: str | None = None


def run_lm_eval(
    config: RunConfig, options: LmEvalOptions, out: Path, report: Callable[[int], None] = lambda cells: None
) -> dict[str, Any]:
    """Run ``config.suites``, which name lm-eval's tasks, and write a results folder. Returns the leaderboard."""
    gate, found = load_gate(config.gate), configurations(config)
    tasks = load_tasks([choice.name for choice in config.suites], options)
    metrics = {name: metric_of(name, task, options.metric) for name, task in tasks.items()}
    loaded = load_model(config.model, dtype=config.dtype, revision=config.revision, numerics=config.numerics)
    plan = asdict(replace(config, suites=tuple(_suite(name, metrics[name], options) for name in tasks)))
    settings = Settings(config.page_size, config.prefill_chunk, config.batch_rows, config.date)
    who = identity(settings, loaded.info, loaded.tokenizer)
    config_hash = who.config_hash(plan, [tasks_hash(tasks)])
    _claim(out, config_hash)
    bench = Bench(loaded, found, settings, config_hash, report)
    scored = {
        configuration.label: evaluated(bench, configuration.label, tasks, metrics, options) for configuration in found
    }
    records = records_of(bench, scored, gate.min_slice_clusters)
    raw = [record for answers in bench.records.values() for record in answers.values()]
    checks = run_checks(bench.runner(bench.shards), bench.shards, raw)
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "plan": plan,
        "identity": asdict(who),
        "config_hash": config_hash,
        "items": len(records) // len(found),
        "items_hash": items_hash([record.item_hash for record in records if record.exact]),
        "columns": [described(configuration) for configuration in found],
        "provenance": provenance(loaded.info),
    }
    (out / SEAL).unlink(missing_ok=True)
    write_json(out / MANIFEST, manifest)
    write_text(out / SAMPLES, "".join(record.to_json() + "\n" for record in records))
    write_json(out / CHECKS, checks)
    write_seal(out)
    board = load_run(out).leaderboard()
    write_json(out / LEADERBOARD, board)
    return board


def tasks_hash(tasks: Mapping[str, Any]) -> str:
    """BLAKE2b-128 of what lm-eval's tasks are configured to do: these stand for the items, which lm-eval makes."""
    return digest(
        {
            name: json.dumps(task.dump_config(), default=lambda value: type(value).__name__, sort_keys=True)
            for name, task in tasks.items()
        }
    )


def load_tasks(names: list[str], options: LmEvalOptions) -> dict[str, Any]:
    """lm-eval's task objects by name, groups taken apart. ValueError for an unknown task or data that is not there."""
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    include = str(options.include_path) if options.include_path else None
    if options.include_path and not options.include_path.is_dir():
        raise ValueError(f"--include-path {options.include_path}: no such folder")
    manager = TaskManager(include_path=include, include_defaults=False) if include else None
    if manager is None or not set(names) <= set(manager.all_tasks):
        manager = TaskManager(include_path=include)  # lm-eval's own tasks: thousands of files
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        raise ValueError(
            f"task {unknown[0]!r}: lm-eval knows no such task; --include-path names a folder with your own"
        )
    try:
        loaded: dict[str, Any] = manager.load(names)["tasks"]
    except Exception as error:  # data sets and task code fail in every way there is
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"tasks {', '.join(names)}: cannot be loaded: {reason}") from error
    for task in loaded.values():
        if options.fewshot is not None:
            task.set_config(key="num_fewshot", value=options.fewshot)
        elif task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
    return loaded


def metric_of(name: str, task: Any, asked: str | None) -> str:
    """The metric that scores a document. ValueError if the task has none that is better when higher."""
    known: Mapping[str, bool] = task.higher_is_better()
    rising = [metric for metric, higher in known.items() if higher]
    wanted = (asked or "").partition(",")[0] or (rising[0] if rising else "")
    if wanted not in rising:
        raise ValueError(
            f"task {name}: metric {wanted or 'none'!r} cannot be judged: a score in [0, 1] that is best when high is "
            f"needed; it has {', '.join(rising) or 'none'} (of {', '.join(known) or 'none'})"
        )
    return wanted


def evaluated(
    bench: Bench, label: str, tasks: Mapping[str, Any], metrics: Mapping[str, str], options: LmEvalOptions
) -> dict[str, list[Scored]]:
    """One configuration's scores, task by task."""
    from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
    from lm_eval.evaluator import evaluate

    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)  # the generator that lm-eval's tasks draw from
    for task in tasks.values():
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    lm = KvgateLM.on(bench, label)
    results = evaluate(
        lm,
        {"tasks": dict(tasks), "groups": {}},
        limit=options.limit,
        bootstrap_iters=0,
        apply_chat_template=options.chat,
        fewshot_as_multiturn=options.chat,
    )
    asked_filter = (options.metric or "").partition(",")[2] or None
    _tell(lm)
    left_out = lm.left_out or {}
    found = {
        name: [
            Scored.of(name, sample, metrics[name], lm.asked)
            for sample in _filtered(name, samples, asked_filter)
            if Origin(name, int(sample["doc_id"])) not in left_out and Origin(name, int(sample["doc_id"])) in lm.asked
        ]
        for name, samples in results["samples"].items()
    }
    for name, scored in found.items():
        if not scored:
            reasons = [reason for origin, reason in left_out.items() if origin.task == name]
            raise ValueError((reasons or [f"task {name}: no document asks anything"])[0])
    return found


def _tell(lm: KvgateLM) -> None:
    """Of documents that are not what they seem, once: of the exact run."""
    if lm.label != EXACT or not (lm.left_out or lm.spanning):
        return
    log = logging.getLogger("kvgate")
    if lm.spanning:
        log.warning("%d documents: a token spans context and continuation; scored as lm-eval does", len(lm.spanning))
    for reason in list((lm.left_out or {}).values())[:3]:
        log.warning("left out: %s", reason)
    if lm.left_out:
        log.warning("%d documents left out under every column", len(lm.left_out))


def _filtered(name: str, samples: list[dict[str, Any]], asked: str | None) -> list[dict[str, Any]]:
    """Samples under one of the task's filters: the first, or the one asked for."""
    filters = list(dict.fromkeys(sample["filter"] for sample in samples))
    wanted = asked or (filters[0] if filters else None)
    if wanted not in filters:
        raise ValueError(f"task {name}: no filter {wanted!r}; it has {', '.join(filters) or 'no documents'}")
    return sorted((sample for sample in samples if sample["filter"] == wanted), key=lambda sample: sample["doc_id"])


def _suite(name: str, metric: str, options: LmEvalOptions) -> SuiteChoice:
    own = {"metric": metric, "limit": options.limit, "fewshot": options.fewshot, "chat": options.chat}
    own |= {MADE_BY: version("lm_eval"), "metric_asked": options.metric}
    return SuiteChoice(name, options=own)


def _claim(out: Path, config_hash: str) -> None:
    """ValueError if the folder holds anything but an earlier run of the same."""
    if (out / MANIFEST).exists():
        if read_json(out / MANIFEST).get("config_hash") != config_hash:
            raise ValueError(f"results folder {out}: holds another run; choose another folder with --out")
    elif out.exists() and any(out.iterdir()):
        raise ValueError(f"results folder {out}: is not empty and holds no run; choose another with --out")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"results folder {out}: {error.strerror}; choose a writable one with --out") from error
