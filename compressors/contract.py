"""What every policy's answer must satisfy, checked at each decision: a policy is not believed."""

from __future__ import annotations

import torch

from kvgate.compressors.budgets import Limit, allowed, excess
from kvgate.compressors.evidence import Evidence, Keep, in_spans
from kvgate.compressors.policy import Policy


class PolicyViolation(ValueError):
    """A policy's answer breaks the rules; nothing was evicted."""


def check_keep(policy: Policy, evidence: Evidence, keep: Keep, limit: Limit | None = None) -> None:
    """Raise PolicyViolation unless ``keep`` is a subset of the live slots, within budget, protected spans in it.

    ``limit``: the budget as it was when the row came under the policy; None: as the policy gives it now.
    """
    limit = limit or Limit.of(policy)
    slots = keep.slots
    if slots.shape != evidence.live.shape or slots.dtype != torch.bool:
        expected = f"torch.bool {tuple(evidence.live.shape)}"
        raise PolicyViolation(f"policy {policy.name}: answered {slots.dtype} {tuple(slots.shape)}, expected {expected}")
    if bool((slots & ~evidence.live).any()):
        raise PolicyViolation(f"policy {policy.name}: keeps slots that are not live; keep a subset of evidence.live")
    counts = slots.sum(-1).cpu().numpy()
    if (over := excess(limit, counts, evidence.exact_slots, evidence.length)) is not None:
        whom = {"head": "a head", "layer": "a layer's heads", "model": "all heads"}[limit.budget_shape]
        most = allowed(limit, counts.shape, evidence.exact_slots, evidence.length)
        raise PolicyViolation(f"policy {policy.name}: keeps {over} tokens of {whom}, its budget is {most}")
    if evidence.protected and bool((evidence.live & ~slots & in_spans(evidence.positions, evidence.protected)).any()):
        raise PolicyViolation(f"policy {policy.name}: evicts a protected token; keep evidence.protected spans")
