"""What a run writes down: one :class:`CellRecord` a line in ``samples.jsonl``, never aggregated away.

``SCHEMA_VERSION`` of every file of a results folder. 2: the files are bound by ``seal.json``
(:mod:`kvgate.evals.log.seal`), ``run.json`` says what its config hash is of, choices record each candidate's score,
fidelity whether the ends agreed: all that is needed to score every answer again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field

from kvgate.typed import STRICT, parse_json

SCHEMA_VERSION = 2
EXACT = "full"

Name = Annotated[str, Field(max_length=10_000)]
Count = Annotated[int, Field(ge=0, lt=1 << 53)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Percent = Annotated[int, Field(ge=0, le=100)]
Scalar = bool | int | float | str | None


@dataclass(frozen=True)
class FidelityRecord:
    """How a run's predictions differ from the exact run's, along the exact run's own answer.

    Attributes:
        kl: KL(exact || this run) in nats at each position, the one where the exact answer ended included; None where
            this run's logits held a NaN.
        diverged: first position at which the most likely tokens differ; None if they never do.
        end_agreed: whether this run would have ended where the exact answer did; None where that was cut, not ended.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = STRICT

    kl: tuple[Annotated[float, Field(ge=0.0)] | None, ...]
    diverged: Count | None
    end_agreed: bool | None = None


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
        candidate_scores: of every candidate of a choice: mean log-probability per token, in nats; None for a NaN or
            one without any probability.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = STRICT

    label: Name
    score: Share | None
    tokens: tuple[TokenId, ...]
    text: str
    capped: bool
    chosen: Count | None = None
    fidelity: FidelityRecord | None = None
    likelihoods: tuple[tuple[float, bool], ...] | None = None
    candidate_scores: tuple[float | None, ...] | None = None


@dataclass(frozen=True)
class CellRecord:
    """One (item, policy, budget, protocol) cell.

    Attributes:
        cell_id: content hash of the item and every parameter below that could change the outcome.
        policy: catalog name; ``full`` is the exact run. ``params`` are the policy's own parameters, ``label`` how
            tables name the cell (policy, mode and requested budget). ``settings``: the parameters that the plan gives
            beside the budget; with the policy's name they tell its family. None in records of before they were kept.
        budget: tokens per (layer, kv head), on average where ``params`` name a shape that shares it; a policy that
            decides "once" keeps what comes after the prompt beside it. None for the exact run. ``ratio`` is what it was
            resolved from, if any.
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
        probe_tokens: extra tokens run over the context for the policy's evidence, as if it ran alone.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = STRICT

    cell_id: Name
    config_hash: Name
    suite: Name
    task: Name
    index: Count
    length: Count
    depth: Share | None
    cluster: Name
    item_hash: Name
    context_hash: Name
    protocol: Name
    policy: Name
    label: Name
    params: Mapping[Name, Scalar | tuple[Scalar, ...]]
    budget: Annotated[int, Field(ge=1, lt=1 << 53)] | None
    ratio: Annotated[float, Field(gt=0.0, le=1.0)] | None
    score: Share
    turns: Annotated[tuple[TurnRecord, ...], Field(min_length=1)]
    evicted_tokens: Annotated[float, Field(ge=0.0, lt=1 << 53)]
    native: bool
    covered: bool
    floored: bool
    resident_bytes: Count
    logical_bytes: Count
    exact_resident_bytes: Count
    context_tokens: Count
    output_tokens: Count
    nan: bool
    facts_kept: tuple[tuple[Percent, ...], ...] | None = None
    settings: Mapping[Name, Scalar | tuple[Scalar, ...]] | None = None
    probe_tokens: Count = 0
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
    def from_json(line: str | bytes) -> CellRecord:
        """The record in a line. Raises ValueError naming a missing, unknown or ill-typed field, or another version."""
        try:
            record = parse_json(CellRecord, line, "sample record")
        except ValueError as error:
            if (found := _version_of(line)) != SCHEMA_VERSION:
                raise ValueError(_other_version(found)) from error
            raise
        if record.schema_version != SCHEMA_VERSION:
            raise ValueError(_other_version(record.schema_version))
        return record


def _version_of(line: str | bytes) -> Any:
    try:
        return json.loads(line)["schema_version"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return SCHEMA_VERSION


def _other_version(found: Any) -> str:
    return f"sample record: schema_version {found!r:.40}, this kvgate reads {SCHEMA_VERSION}; run the plan again"
