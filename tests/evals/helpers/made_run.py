"""A finished run's folder with the items of a real plan and answers as a test wants them; it verifies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kvgate.engine.models import LoadedModel, load_model
from kvgate.evals.data.items import Exact
from kvgate.evals.log.names import CHECKS, MANIFEST, SAMPLES
from kvgate.evals.log.records import SCHEMA_VERSION, CellRecord, TurnRecord
from kvgate.evals.log.run_folder import write_json, write_seal
from kvgate.evals.plan.cells import Cell
from kvgate.evals.plan.config import parse_plan
from kvgate.evals.run.identity import identity
from kvgate.evals.run.prepare import make_work
from kvgate.evals.run.provenance import provenance

WRONG = " nothing of the kind"


@dataclass
class MadeRun:
    """Writes folders of runs on the model at ``model``."""

    model: Path

    @cached_property
    def loaded(self) -> LoadedModel:
        return load_model(str(self.model), dtype="float32")

    def save(
        self, folder: Path, losses: Mapping[float, int], items: int = 40, different: int = 0, **repeat: Any
    ) -> Path:
        """``losses``: ratio of h2o -> how many of the first items it gets wrong; the exact run gets all right."""
        plan = {
            "name": "made_up", "model": str(self.model), "dtype": "float32",
            "suites": [{"name": "retrieval", "counts": {400: items}, "tasks": ["single"]}],
            "policies": [{"policy": "h2o", "budgets": list(losses)}],
        }  # fmt: skip
        config = parse_plan(plan, "made_up")
        work = make_work(config, self.loaded.tokenizer, identity(config, self.loaded.info, self.loaded.tokenizer))
        cells = [cell for shard in work.shards for cell in shard.cells]
        lost = {f"h2o@{ratio:g}": count for ratio, count in losses.items()}
        records = [
            self._record(cell, work.config_hash, cell.item.index >= lost.get(cell.configuration.label, 0))
            for cell in cells
        ]
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / MANIFEST, work.manifest(provenance(self.loaded.info)))
        counted = {"cells": 4, "different": different}
        write_json(folder / CHECKS, {
            "schema_version": SCHEMA_VERSION, "units": [0], "repeat": {"full": counted, **repeat},
            "batch_invariance": {"cells": 4, "different": 0},
        })  # fmt: skip
        (folder / SAMPLES).write_text("".join(record.to_json() + "\n" for record in records))
        write_seal(folder)
        return folder

    def _record(self, cell: Cell, config_hash: str, right: bool) -> CellRecord:
        item, tokenizer = cell.item, self.loaded.tokenizer
        scoring = item.turns[0].scoring
        assert isinstance(scoring, Exact)
        text = f" {scoring.accept[0]}"
        text = text if right else WRONG[: len(text)]  # as long, since length is judged too
        tokens = tuple(tokenizer.encode(text, add_special_tokens=False))
        full = 1000 * len(item.context)
        held = full if cell.budget is None else full * cell.budget // len(item.context)
        return CellRecord(
            cell_id=cell.cell_id, config_hash=config_hash, suite=item.suite, task=item.task, index=item.index,
            length=item.length, depth=item.depth, cluster=item.cluster, item_hash=item.item_hash,
            context_hash=item.context_hash, protocol=item.protocol, policy=cell.policy.name if cell.policy else "full",
            label=cell.configuration.label, params=cell.policy.describe() if cell.policy else {}, budget=cell.budget,
            ratio=cell.configuration.ratio, score=float(right),
            turns=(TurnRecord(item.turns[0].label, float(right), tokens, tokenizer.decode(list(tokens)), False),),
            evicted_tokens=0.0 if cell.budget is None else float(len(item.context) - cell.budget), native=False,
            covered=False, floored=cell.floored, resident_bytes=held, logical_bytes=held, exact_resident_bytes=full,
            context_tokens=len(item.context), output_tokens=len(tokens), nan=False,
            settings=dict(cell.configuration.params),
        )  # fmt: skip


def edit_samples(folder: Path, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    """Rewrite ``samples.jsonl`` and seal the folder again, as a forger would."""
    import json

    rows = change([json.loads(line) for line in (folder / SAMPLES).read_text().splitlines()])
    text = "".join(json.dumps(row, sort_keys=True, separators=(",", ":"), ensure_ascii=False) + "\n" for row in rows)
    (folder / SAMPLES).write_text(text)
    write_seal(folder)


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite ``run.json`` and seal the folder again, as a forger would."""
    import json

    manifest = json.loads((folder / MANIFEST).read_text())
    change(manifest)
    write_json(folder / MANIFEST, manifest)
    write_seal(folder)
