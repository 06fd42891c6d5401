"""``kvgate verify`` for a run of lm-eval's tasks: lm-eval builds its requests again and scores the recorded answers.

The recorded turns stand in for the model: each request is answered with what its document's record has in its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from kvgate.engine.models import LoadedModel, ModelInfo
from kvgate.engine.tokenizer import load_tokenizer
from kvgate.evals.data.items import Ids, Item, candidates_of
from kvgate.evals.judge.gates import load_gate
from kvgate.evals.leaderboard.finished import FinishedRun
from kvgate.evals.lm_eval.bench import Bench, Settings
from kvgate.evals.lm_eval.records import records_of
from kvgate.evals.lm_eval.run import LmEvalOptions, evaluated, load_tasks, metric_of, tasks_hash
from kvgate.evals.log.records import CellRecord
from kvgate.evals.log.verification import Verification
from kvgate.evals.plan.cells import configurations
from kvgate.evals.plan.config import recorded_plan
from kvgate.evals.run.identity import Identity, template_hash, tokenizer_hash
from kvgate.evals.run.prepare import described, items_hash
from kvgate.evals.run.verify import identity_faults, notes_on
from kvgate.typed import STRICT, parse

_SAME = ("suite", "task", "index", "length", "cluster", "item_hash", "context_hash", "label", "score", "output_tokens")


@dataclass(frozen=True)
class Asked:
    """How lm-eval was asked, as the plan of its run has it in the options of every task."""

    __pydantic_config__: ClassVar[Mapping[str, Any]] = STRICT

    metric: str
    lm_eval: str
    limit: int | None = None
    fewshot: int | None = None
    chat: bool = False
    metric_asked: str | None = None


@dataclass
class Recorded(Bench):
    """A bench that answers from records. ``documents``: (task, document, label) -> record."""

    documents: Mapping[tuple[str, int, str], CellRecord] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    _asked: dict[tuple[str, int], int] = field(default_factory=dict)

    def answer(self, items: Sequence[Item]) -> None:
        """Each new item takes its document's next recorded turn."""
        for item in items:
            if item.item_hash not in self.records:
                document = (item.suite, item.index)
                place = self._asked[document] = self._asked.get(document, -1) + 1
                self.records[item.item_hash] = {
                    configuration.label: self._recorded(item, configuration.label, place)
                    for configuration in self.configurations
                }

    def _recorded(self, item: Item, label: str, place: int) -> CellRecord:
        record = self.documents.get((item.suite, item.index, label))
        where = f"{item.suite}/{item.index}, {label}"
        if record is None or place >= len(record.turns):
            raise ValueError(f"{where}: lm-eval asks {place + 1} times, the record has fewer answers")
        turn = record.turns[place]
        candidates = candidates_of(item.turns[0])
        if (text := self.loaded.tokenizer.decode(list(turn.tokens))) != turn.text:
            self.faults.append(f"{where}: text is {turn.text!r:.120}, its tokens say {text!r:.120}")
        if candidates and not record.nan:
            if len(turn.likelihoods or ()) != len(candidates):
                raise ValueError(f"{where}: has no likelihood for each of {len(candidates)} candidates")
            totals = [total for total, _ in turn.likelihoods or ()]
            best = max(range(len(totals)), key=totals.__getitem__)
            if (turn.chosen, turn.tokens) != (best, candidates[best]):
                self.faults.append(f"{where}: chosen is {turn.chosen}, its likelihoods say {best}")
        return replace(
            record, turns=(replace(turn, score=0.0),), context_hash=item.context_hash, output_tokens=len(turn.tokens)
        )

    def rolling(self, context: Ids, continuation: Ids) -> list[float]:
        """Not recorded. Raises ValueError."""
        raise ValueError("likelihoods of whole texts are not in the records; the task cannot be scored again")


def verify_lm_eval(run: FinishedRun, include_path: Path | None = None) -> Verification:
    """Build and score a run of lm-eval's tasks again. ValueError where lm-eval cannot make its requests here."""
    config = recorded_plan(run.manifest)
    tokenizer = load_tokenizer(config.model, config.revision)
    said = parse(Identity, run.manifest["identity"], "run.json: identity")
    here = replace(said, tokenizer_hash=tokenizer_hash(tokenizer), template_hash=template_hash(tokenizer))
    asked = parse(Asked, run.manifest["plan"]["suites"][0]["options"], "run.json: plan: suites[0]: options")
    options = LmEvalOptions(include_path, asked.limit, asked.fewshot, asked.chat, asked.metric_asked)
    tasks = load_tasks([choice.name for choice in config.suites], options)
    found = configurations(config)
    documents = {(record.task, record.index, record.label): record for record in run.records}
    settings = Settings(config.page_size, config.prefill_chunk, config.batch_rows, config.date)
    info = parse(ModelInfo, run.manifest["provenance"]["model"], "run.json: provenance: model")
    loaded = LoadedModel(None, tokenizer, info)
    bench = Recorded(loaded, found, settings, run.manifest["config_hash"], documents=documents)
    metrics = {name: metric_of(name, task, options.metric) for name, task in tasks.items()}
    scored = {
        configuration.label: evaluated(bench, configuration.label, tasks, metrics, options) for configuration in found
    }
    made = records_of(bench, scored, load_gate(config.gate).min_slice_clusters)
    items = len(made) // len(found)
    manifest: dict[str, Any] = {
        "config_hash": here.config_hash(run.manifest["plan"], [tasks_hash(tasks)]),
        "items": items,
        "items_hash": items_hash([record.item_hash for record in made if record.exact]),
        "columns": [described(configuration) for configuration in found],
    }
    faults = [
        *identity_faults(run.manifest, said, here, config.model),
        *_differences(run, made, manifest),
        *bench.faults,
    ]
    return Verification.of(run.head, items, len(made), faults, notes_on(run.manifest, said))


def _differences(run: FinishedRun, made: Sequence[CellRecord], manifest: Mapping[str, Any]) -> Iterator[str]:
    for name, value in manifest.items():
        if run.manifest[name] != value:
            yield f"run.json: {name} is {run.manifest[name]!r:.120}, its tasks make {value!r:.120}"
    if len(made) != len(run.records):
        yield f"samples.jsonl has {len(run.records)} cells, its tasks make {len(made)}"
    for record, again in zip(run.records, made, strict=False):
        where = f"{record.task}/{record.index}, {record.label}"
        for name in _SAME:
            if (was := getattr(record, name)) != (value := getattr(again, name)):
                yield f"{where}: {name} is {was!r:.120}, made again it is {value!r:.120}"
        if [turn.score for turn in record.turns] != [turn.score for turn in again.turns]:
            yield f"{where}: scores of its turns are not what lm-eval gives"
