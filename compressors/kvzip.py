"""KVzip: what the model looks at when it repeats its context.

Source: Kim et al. 2025, "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction", section 3: context is
repeated chunk by chunk (2K tokens, section 3.3) after a prompt; a pair's score is the largest attention probability
it receives from any repeated token and any query head of its group (equation 2); the budget is shared by all heads of
all layers (section 4.1). Probabilities here are those of the whole cache, where the authors' code normalises over the
chunk alone; for contexts of one chunk that is the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvgate.compressors.attending import model_of, peaks
from kvgate.compressors.evidence import Evidence, Need, Span
from kvgate.compressors.policy import Shape
from kvgate.compressors.scored import Scored

CHUNK = 2048
REPEAT = "\n\nRepeat the previous context:"  # for the first chunk
RESUME = "\n\nRepeat the previous context starting with"  # followed by the last tokens of the chunk before
OVERLAP = 8  # of those tokens, as in the authors' code
PROMPT = 48  # most tokens that any tokenizer makes of the prompts: one a byte


@dataclass(frozen=True)
class KVzip(Scored):
    """Keeps what repeating the context attends most; the first ``sinks`` tokens stay in any case (4 in kvpress)."""

    name: ClassVar[str] = "kvzip"
    needs: ClassVar[frozenset[Need]] = frozenset({"probe", "keys"})
    shape: Shape = "model"
    sinks: int = 4

    @classmethod
    def smallest_budget(cls, sinks: int = 4, **params: Any) -> int:
        return sinks + 1

    def forced_spans(self, protected: tuple[Span, ...]) -> tuple[Span, ...]:
        return (Span(0, self.sinks), *protected) if self.sinks else protected

    def probe_tokens(self, prompt: int) -> int:
        return min(prompt, CHUNK) + OVERLAP + PROMPT

    def score(self, evidence: Evidence) -> Tensor:
        assert evidence.probe is not None, "kvzip needs a probe"
        found = torch.zeros(evidence.live.shape, device=evidence.live.device)
        for text in self._repetitions(evidence):
            found = torch.maximum(found, peaks(evidence.probe(text), evidence))
        return found

    def _repetitions(self, evidence: Evidence) -> Iterator[list[int]]:
        """Token ids of each probe."""
        tokens, encode = list(evidence.tokens), model_of(evidence).encode
        for start in range(0, len(tokens), CHUNK):
            before = tokens[max(0, start - OVERLAP) : start]
            prompt = encode(RESUME) + before if start else encode(REPEAT)
            yield prompt + tokens[start : start + CHUNK]
