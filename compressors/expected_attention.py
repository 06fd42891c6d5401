"""Expected Attention: what future queries, taken as normal, will attend.

Source: Devoto et al. 2025, "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries
Distribution", section 3: E[exp(q.k scale)] for q normal with the mean and covariance of the queries before rotation,
turned by the mean rotation of the next ``future`` positions; softmax over the tokens, mean over the heads of a group,
times the value's norm. Defaults are kvpress's: 512 positions, 4 sinks, left out of everything and kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvgate.compressors.attending import model_of
from kvgate.compressors.evidence import Evidence, Need, QueryMoments, Span
from kvgate.compressors.scored import Scored

SINKS = 4


@dataclass(frozen=True)
class ExpectedAttention(Scored):
    """Keeps what the next ``future`` queries are expected to use most."""

    name: ClassVar[str] = "expected_attention"
    needs: ClassVar[frozenset[Need]] = frozenset({"keys", "values", QueryMoments(SINKS)})
    future: int = 512

    @classmethod
    def smallest_budget(cls, **params: Any) -> int:
        return SINKS + 1

    def forced_spans(self, protected: tuple[Span, ...]) -> tuple[Span, ...]:
        return (Span(0, SINKS), *protected)

    def score(self, evidence: Evidence) -> Tensor:
        assert evidence.keys is not None, "expected_attention needs keys"
        assert evidence.values is not None, "expected_attention needs values"
        norms: Tensor = torch.linalg.vector_norm(
            torch.where(evidence.live[..., None], evidence.values(), 0).float(), dim=-1
        )
        if evidence.moments is None:  # no token beyond the sinks yet
            return norms
        keys = torch.where(evidence.live[..., None], evidence.keys(), 0).float()
        counted = evidence.live & (evidence.positions >= SINKS)
        return norms * torch.stack([self._layer(evidence, keys, counted, layer) for layer in range(len(keys))])

    def _layer(self, evidence: Evidence, keys: Tensor, counted: Tensor, layer: int) -> Tensor:
        assert evidence.moments is not None
        model = model_of(evidence)
        heads, dim = keys.shape[1], keys.shape[-1]
        ahead = torch.arange(evidence.length, evidence.length + self.future, device=keys.device)
        axes = torch.eye(dim, device=keys.device)[:, None].expand(-1, self.future, -1)
        turn = model.turn(axes, ahead, layer).mean(1)  # row i: the mean rotation of axis i
        mean = (evidence.moments.mean[layer] @ turn).view(heads, -1, dim)
        spread = (turn.T @ evidence.moments.covariance[layer] @ turn).view(heads, -1, dim, dim)
        line = torch.einsum("hgd,hsd->hgs", mean, keys[layer]) * model.scale
        bend = ((keys[layer][:, None] @ spread) * keys[layer][:, None]).sum(-1) * (model.scale**2 / 2)
        logits = (line + bend).masked_fill(~counted[layer][:, None], -torch.inf)
        return torch.nan_to_num(torch.softmax(logits, -1)).mean(1)
