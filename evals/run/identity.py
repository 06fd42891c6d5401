"""What decides a run's outcome besides its plan: the one list, for runs of suites and of lm-eval's tasks alike.

Its hash is in every cell id and, with the plan and the items, in the config hash. Package versions and the machine are
not in it: the same plan has one name everywhere, and where they differ answers may round differently (``provenance`` in
``run.json`` has them; a run is only continued where they agree).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar, Protocol

from pydantic import Field

from kvgate.engine.models import ModelInfo
from kvgate.evals.data.items import Item, digest
from kvgate.evals.run.provenance import code_hash
from kvgate.typed import STRICT

Hash = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


@dataclass(frozen=True)
class Identity:
    """Everything besides plan and items that could change an answer or a score.

    Attributes:
        weights_hash, dtype, device, stop_ids: the model's; see :class:`kvgate.engine.models.ModelInfo`.
        tokenizer_hash: of its vocabulary, merges, normalisers, added tokens; ``template_hash``: of its chat template.
        date: the day that a chat template is told, as the plan gives it.
        page_size, prefill_chunk, batch_rows: the plan's.
        code_hash: of the code that changes outcomes; see :func:`kvgate.evals.run.provenance.code_hash`.
    """

    __pydantic_config__: ClassVar[Mapping[str, Any]] = STRICT

    weights_hash: Hash
    dtype: str
    device: str
    stop_ids: tuple[int, ...]
    tokenizer_hash: Hash
    template_hash: Hash
    date: str
    page_size: int
    prefill_chunk: int
    batch_rows: int
    code_hash: Hash

    @property
    def fingerprint(self) -> str:
        """BLAKE2b-128 of all of it: a part of every cell id."""
        return digest(asdict(self))

    def config_hash(self, plan: Mapping[str, Any], items: Sequence[Item | str]) -> str:
        """Hash of plan, items in order, and identity. ``items`` may be given by their hashes."""
        hashes = [item if isinstance(item, str) else item.item_hash for item in items]
        return digest([plan, hashes, asdict(self)])


class Layout(Protocol):
    """The part of a plan that shapes batches and items."""

    @property
    def page_size(self) -> int: ...
    @property
    def prefill_chunk(self) -> int: ...
    @property
    def batch_rows(self) -> int: ...
    @property
    def date(self) -> str: ...


def identity(config: Layout, info: ModelInfo, tokenizer: Any) -> Identity:
    """The identity of a plan on a loaded model."""
    return Identity(
        weights_hash=info.weights_hash,
        dtype=info.dtype,
        device=info.device,
        stop_ids=info.stop_ids,
        tokenizer_hash=tokenizer_hash(tokenizer),
        template_hash=template_hash(tokenizer),
        date=config.date,
        page_size=config.page_size,
        prefill_chunk=config.prefill_chunk,
        batch_rows=config.batch_rows,
        code_hash=code_hash(),
    )


def tokenizer_hash(tokenizer: Any) -> str:
    """BLAKE2b-128 of what turns text to ids: of a fast tokenizer its whole pipeline, else vocabulary and added tokens.

    Truncation and padding are left out, since encoding changes them and kvgate uses neither.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        pipeline = json.loads(backend.to_str())
        parts: Any = {key: value for key, value in pipeline.items() if key not in ("truncation", "padding")}
    else:
        parts = [type(tokenizer).__name__, tokenizer.get_vocab()]
    specials = {name: str(value) for name, value in sorted(getattr(tokenizer, "special_tokens_map", {}).items())}
    return digest([parts, specials])


def template_hash(tokenizer: Any) -> str:
    """BLAKE2b-128 of the chat template; of an empty text where there is none."""
    template = getattr(tokenizer, "chat_template", None) or ""
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
