"""The next token from logits: penalties, temperature, top-k, top-p, and draws that depend on seed and place only.

Penalties follow OpenAI's definition: logit - count * frequency_penalty - (count > 0) * presence_penalty, counted over
the answer so far. The draw at place i of an answer uses a Philox counter (Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", SC 2011) with the seed as key and i as counter, so neither other rows nor a preemption move it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

_SHORTLIST = 1024  # most likely tokens that are looked at first; a flat distribution needs them all


@dataclass(frozen=True)
class Sampling:
    """How to choose. ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 leave all tokens in.

    Attributes:
        bias: added to the logits of single token ids.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)

    def choose(self, logits: Tensor, answer: Sequence[int]) -> int:
        """The id that follows ``answer``, from fp32 logits ``[V]``. Ties go to the lower id."""
        logits = self._adjusted(logits, answer)
        if self.temperature == 0.0:
            return int(logits.argmax())
        ids, probabilities = self._nucleus(torch.softmax(logits.double() / self.temperature, -1))
        random = np.random.Generator(np.random.Philox(key=self.seed % 2**64, counter=len(answer)))
        at = torch.searchsorted(probabilities.cumsum(0), random.random() * float(probabilities.sum()), right=True)
        place = min(int(at), len(probabilities) - 1)
        return place if ids is None else int(ids[place])

    def _adjusted(self, logits: Tensor, answer: Sequence[int]) -> Tensor:
        if (self.presence_penalty or self.frequency_penalty) and answer:
            counts = torch.bincount(torch.tensor(list(answer), device=logits.device), minlength=len(logits))
            logits = logits - self.frequency_penalty * counts - self.presence_penalty * (counts > 0)
        if self.bias:
            logits = logits.clone()
            logits[list(self.bias)] += torch.tensor(list(self.bias.values()), device=logits.device)
        return logits

    def _nucleus(self, probabilities: Tensor) -> tuple[Tensor | None, Tensor]:
        """Ids and probabilities that stay; None for all of them. Holtzman et al. (ICLR 2020): the smallest set of the
        likeliest tokens whose mass reaches top_p."""
        if self.top_k == 0 and self.top_p >= 1.0:
            return None, probabilities
        size = len(probabilities)
        most = min(self.top_k or size, size)
        looked = most if self.top_k else min(most, _SHORTLIST)
        while True:
            kept, ids = probabilities.topk(looked)
            total = float(kept.sum()) if self.top_k else 1.0
            if looked == most or float(kept.sum()) >= self.top_p:
                break
            looked = most
        if self.top_p < 1.0:
            before = kept.cumsum(0) - kept
            inside = before < self.top_p * total
            inside[0] = True
            kept, ids = kept[inside], ids[inside]
        order = ids.argsort()
        return ids[order], kept[order]
