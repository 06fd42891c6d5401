"""Task scores of live requests: what their metadata says the right answer is.

``reference``: a text, or a JSON array of accepted texts. ``check``: how it counts, one of

- ``word`` (default): an accepted answer stands in the first line, ``first``: the first line begins with it,
- ``recall``: share of the texts that occur, ``f1`` and ``edit``: likeness to the best of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from kvgate.evals.data.items import Answer, Exact, Overlap, Recall
from kvgate.evals.scoring.scores import score_answer

CHECKS = ("word", "first", "recall", "f1", "edit")


def rule_of(metadata: Mapping[str, str]) -> Answer | None:
    """How to score answers to a request; None where its metadata do not say. ValueError for what is no such rule."""
    reference = metadata.get("reference")
    if reference is None:
        return None
    check = metadata.get("check", "word")
    texts = _texts(reference)
    match check:
        case "word" | "first":
            return Exact(texts, match=check)
        case "recall":
            return Recall(texts)
        case "f1" | "edit":
            return Overlap(texts, measure=check)
    raise ValueError(f"metadata.check is {check!r:.40}, needs one of {', '.join(CHECKS)}")


def difference(rule: Answer, policy: str, exact: str) -> float:
    """Score of the policy's answer minus that of the exact one."""
    return score_answer(policy, rule) - score_answer(exact, rule)


def _texts(reference: str) -> tuple[str, ...]:
    if reference.startswith("["):
        try:
            found = json.loads(reference)
        except ValueError:
            found = reference
        if isinstance(found, list) and found and all(isinstance(text, str) and text for text in found):
            return tuple(found)
    if not reference.strip():
        raise ValueError("metadata.reference is empty")
    return (reference,)
