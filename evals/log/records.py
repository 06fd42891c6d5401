"""What a run writes down: one :class:`CellRecord` a line in ``samples.jsonl``, never aggregated away."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

SCHEMA_VERSION = 1
EXACT = "full"


@dataclass(frozen=True)
class FidelityRecord:
    """How a run's predictions differ from the exact run's, along the exact run's own answer.

    Attributes:
        kl: KL(exact || this run) in nats at each position, the one where the exact answer ended included; None where
            this run's logits held a NaN.
        diverged: first position at which the most likely tokens differ; None if they never do.
    """

    kl: tuple[float | None, ...]
    diverged: int | None


@dataclass(frozen=True)
class TurnRecord:
    """One answered turn.

    Attributes:
        label: the turn's label in its item.
        score: in [0, 1]; None for a filler turn.
        tokens: generated ids, end-of-sequence excluded.
        text: the same, decoded for readers; never encoded again.
        capped: the answer reached ``max_new_tokens`` without an end.
        chosen: index of the candidate with the highest likelihood, for a choice.
        fidelity: for a turn that follows the exact run's answer; ``tokens`` are then what this run would have written
            at each position of that answer.
        likelihoods: of every candidate of a turn that somebody else scores: nats, and whether it is the greedy answer.
    """

    label: str
    score: float | None
    tokens: tuple[int, ...]
    text: str
    capped: bool
    chosen: int | None = None
    fidelity: FidelityRecord | None = None
    likelihoods: tuple[tuple[float, bool], ...] | None = None

    @staticmethod
    def from_mapping(row: Mapping[str, Any]) -> TurnRecord:
        """The turn in a decoded record. Raises KeyError or TypeError for a missing or unknown field."""
        fields = {**row, "tokens": tuple(row["tokens"])}
        if fields.get("fidelity") is not None:
            found = dict(fields["fidelity"])
            fields["fidelity"] = FidelityRecord(**{**found, "kl": tuple(found["kl"])})
        if fields.get("likelihoods") is not None:
            fields["likelihoods"] = tuple((total, greedy) for total, greedy in fields["likelihoods"])
        return TurnRecord(**fields)


@dataclass(frozen=True)
class CellRecord:
    """One (item, policy, budget, protocol) cell.

    Attributes:
        cell_id: content hash of the item and every parameter below that could change the outcome.
        policy: catalog name; ``full`` is the exact run. ``params`` are the policy's own parameters, ``label`` how
            tables name the cell (policy, mode and requested budget). ``settings``: the parameters that the plan gives
            beside the budget; with the policy's name they tell its family. None in records of before they were kept.
        budget: tokens per (layer, kv head); None for the exact run. ``ratio`` is what it was resolved from, if any.
        length, depth, task: the slice. ``cluster``: items sharing it count as one observation.
        score: mean over the scored turns, in [0, 1].
        evicted_tokens: slots evicted, mean over layers and kv heads, over the whole cell.
        native: the eviction is lossless, since every layer declares a window no larger than the policy's.
        covered: the budget is at least the longest length the cell reached, so nothing had to go.
        floored: the ratio gave less than the policy's smallest possible budget, which was used instead.
        resident_bytes: whole pages referenced when the answer starts, as if the cell ran alone; ``logical_bytes``: live
            slots only; ``exact_resident_bytes``: the exact run's, on the same item.
        context_tokens, output_tokens: lengths in tokens.
        nan: a NaN was seen in the logits.
        facts_kept: for each span of context tokens that holds the evidence, token by token, the share of (layer, kv
            head) lists that still attend the token when the first answer starts, in whole percent. None where the
            suite names no such span.
    """

    cell_id: str
    config_hash: str
    suite: str
    task: str
    index: int
    length: int
    depth: float | None
    cluster: str
    item_hash: str
    context_hash: str
    protocol: str
    policy: str
    label: str
    params: Mapping[str, Any]
    budget: int | None
    ratio: float | None
    score: float
    turns: tuple[TurnRecord, ...]
    evicted_tokens: float
    native: bool
    covered: bool
    floored: bool
    resident_bytes: int
    logical_bytes: int
    exact_resident_bytes: int
    context_tokens: int
    output_tokens: int
    nan: bool
    facts_kept: tuple[tuple[int, ...], ...] | None = None
    settings: Mapping[str, Any] | None = None
    schema_version: int = SCHEMA_VERSION

    @property
    def evidence_kept(self) -> float | None:
        """Share of the evidence that is still attended, in [0, 1]; None where nobody said where it stands."""
        tokens = [percent for span in self.facts_kept or () for percent in span]
        return sum(tokens) / (100.0 * len(tokens)) if tokens else None

    @property
    def exact(self) -> bool:
        """Whether this is the full-KV side of a pair."""
        return self.policy == EXACT

    @property
    def capped(self) -> bool:
        """Whether any scored answer was cut by its token cap."""
        return any(turn.capped for turn in self.turns if turn.score is not None)

    def to_json(self) -> str:
        """One canonical line, without the newline."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)

    @staticmethod
    def from_mapping(row: Mapping[str, Any]) -> CellRecord:
        """The record in a decoded line. Raises ValueError naming a missing, unknown or ill-typed field."""
        fields = dict(row)
        try:
            turns = tuple(TurnRecord.from_mapping(turn) for turn in fields.pop("turns"))
            facts = fields.pop("facts_kept", None)
            kept = None if facts is None else tuple(tuple(span) for span in facts)
            record = CellRecord(turns=turns, facts_kept=kept, **fields)
        except (KeyError, TypeError) as error:
            raise ValueError(f"sample record: {error}") from error
        if record.schema_version != SCHEMA_VERSION:
            raise ValueError(
                f"sample record: schema_version {record.schema_version}, this kvgate reads {SCHEMA_VERSION}"
            )
        for name, score in (("score", record.score), *(("a turn's score", turn.score) for turn in turns)):
            if score is not None and not (isinstance(score, int | float) and 0 <= score <= 1):
                raise ValueError(f"sample record: {name} is {score!r}, outside [0, 1]")
        return record
