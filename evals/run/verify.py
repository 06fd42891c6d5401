"""``kvgate verify``: is a finished run what its plan makes? Items are built and answers scored again, without weights.

Checked: the seal; the identity against tokenizer, plan and (where the model is a folder) the weight files; every item,
in order and complete; every cell's policy, settings and budget; every answer's text and score. Not checked, since only
the model can: that it gave these answers, and what it kept in memory (``kvgate rerun``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kvgate.engine.models import hash_folder
from kvgate.engine.tokenizer import load_tokenizer, model_folder
from kvgate.evals.leaderboard.finished import FinishedRun, load_run
from kvgate.evals.lm_eval.items import MADE_BY
from kvgate.evals.log.records import CellRecord
from kvgate.evals.log.verification import Verification
from kvgate.evals.plan.cells import Cell
from kvgate.evals.plan.config import recorded_plan
from kvgate.evals.run.early_stopping import items_in
from kvgate.evals.run.identity import Identity, template_hash, tokenizer_hash
from kvgate.evals.run.prepare import Work, described, drawn_order, items_hash, make_work
from kvgate.evals.run.provenance import code_hash
from kvgate.evals.scoring.again import contradictions
from kvgate.typed import parse


def verify(run: FinishedRun | Path) -> Verification:
    """Build and score a finished run again. ValueError if it is unreadable, unsealed, or its plan cannot be built."""
    run = load_run(run) if isinstance(run, Path) else run
    if any(MADE_BY in suite["options"] for suite in run.manifest["plan"]["suites"]):
        raise ValueError(f"results folder {run.path}: its items are lm-eval's; they cannot be built from a plan")
    config = recorded_plan(run.manifest)
    tokenizer = load_tokenizer(config.model, config.revision)
    said = parse(Identity, run.manifest["identity"], "run.json: identity")
    here = replace(
        said, tokenizer_hash=tokenizer_hash(tokenizer), template_hash=template_hash(tokenizer),
        date=config.date, page_size=config.page_size, prefill_chunk=config.prefill_chunk, batch_rows=config.batch_rows,
    )  # fmt: skip
    work = make_work(config, tokenizer, here)
    faults = [*identity_faults(run.manifest, said, here, config.model), *_plan_faults(run, work)]
    cells = _cells(run, work)
    faults += _order_faults(run.records, cells)
    if not faults:  # cells and records are the same ones in the same order
        faults += _answer_faults(run.records, cells, said.stop_ids, tokenizer)
    items = len({record.item_hash for record in run.records})
    return Verification.of(run.head, items, len(run.records), faults, notes_on(run.manifest, said))


def identity_faults(manifest: Mapping[str, Any], said: Identity, here: Identity, model: str) -> Iterator[str]:
    """Where the recorded identity contradicts what is ``here``, the provenance, or the weights that are at hand."""
    for name, was in asdict(said).items():
        if was != (now := getattr(here, name)):
            yield f"identity: {name} was {was}, the plan and its tokenizer give {now}"
    origin = manifest["provenance"]
    for name in ("weights_hash", "dtype", "device", "stop_ids"):
        if (told := origin["model"].get(name)) != (value := asdict(said)[name]) and told != list(_listed(value)):
            yield f"provenance: model {name} is {told}, the identity has {value}"
    if origin["code_hash"] != said.code_hash:
        yield f"provenance: code_hash is {origin['code_hash']}, the identity has {said.code_hash}"
    if origin["model"]["name"] != model:
        yield f"provenance: the model is {origin['model']['name']!r}, the plan's {model!r}"
    folder = model_folder(model)
    if folder is not None and (found := hash_folder(folder)) != said.weights_hash:
        yield f"weights in {folder} have the hash {found}, the run's had {said.weights_hash}"


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple | list) else ()


def _plan_faults(run: FinishedRun, work: Work) -> Iterator[str]:
    python = run.manifest["provenance"]["python"]
    made = {
        "config_hash": work.config_hash,
        "items": len(work.items),
        "items_hash": items_hash([item.item_hash for item in work.items]),
        "order": drawn_order(work.batches),
        "columns": [described(configuration) for configuration in work.configurations],
    }
    for name, value in made.items():
        if (was := run.manifest[name]) != value:
            yield f"run.json: {name} is {_short(was)}, the plan makes {_short(value)} (run made under python {python})"


def _cells(run: FinishedRun, work: Work) -> list[Cell]:
    """The cells that the run must have: all, or those of the rounds until it stopped."""
    batches, items = [], 0
    for batch in work.batches:
        if run.stop is not None and items >= run.stop["items"]:
            break
        batches.append(batch)
        items += items_in(batch)
    return [cell for batch in batches for shard in batch for cell in shard.cells]


def _order_faults(records: Sequence[CellRecord], cells: Sequence[Cell]) -> Iterator[str]:
    """Whether the records are the plan's cells, in its order: ids are hashes of item, policy, budget and identity."""
    if len(records) != len(cells):
        yield f"samples.jsonl has {len(records)} cells, the plan makes {len(cells)}"
    for place, (record, cell) in enumerate(zip(records, cells, strict=False), 1):
        if record.cell_id != cell.cell_id:
            yield (
                f"line {place} is cell {record.cell_id[:12]} ({record.label}), the plan has {cell.cell_id[:12]} "
                f"({cell.item.suite}/{cell.item.task}/{cell.item.index}, {cell.configuration.label})"
            )
            return


def _answer_faults(
    records: Sequence[CellRecord], cells: Sequence[Cell], stop_ids: Sequence[int], tokenizer: Any
) -> Iterator[str]:
    exact = {record.item_hash: record for record in records if record.exact}
    for record, cell in zip(records, cells, strict=True):
        where = f"{record.suite}/{record.task}/{record.index} at {record.length}, {record.label}"
        for name, value in _stated(cell).items():
            if (was := getattr(record, name)) != value:
                yield f"{where}: {name} is {_short(was)}, the plan makes {_short(value)}"
        led = exact.get(record.item_hash)
        if led is None or len(led.turns) != len(cell.item.turns):
            yield f"{where}: has no exact record with an answer to each turn"
            continue
        for name, was, value in contradictions(cell.item, record, led, stop_ids, tokenizer.decode):
            yield f"{where}: {name} is {_short(was)}, scored again it is {_short(value)}"


def _stated(cell: Cell) -> dict[str, Any]:
    """What a record repeats of its cell."""
    item, configuration = cell.item, cell.configuration
    same = ("suite", "task", "index", "length", "depth", "cluster", "item_hash", "context_hash", "protocol")
    return {name: getattr(item, name) for name in same} | {
        "label": configuration.label,
        "policy": cell.policy.name if cell.policy else configuration.name,
        "settings": dict(configuration.params),
        "ratio": configuration.ratio,
        "budget": cell.budget,
        "floored": cell.floored,
        "context_tokens": len(item.context),
    }


def notes_on(manifest: Mapping[str, Any], said: Identity) -> list[str]:
    """What a reader should know of a run besides its faults."""
    notes = []
    if said.code_hash != code_hash():
        notes.append("made by another version of the code that changes outcomes; built and scored by this one")
    if manifest["provenance"]["git"].get("dirty"):
        notes.append("made from a tree with uncommitted changes")
    return notes


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 120 else f"{text[:120]}..."
