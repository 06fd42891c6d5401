"""Fidelity: every policy is fed the exact run's own answer, token by token, and its predictions are compared.

Teacher forcing keeps both runs on the same text, so that each position compares two distributions over the next token
given the same history, one with the whole cache and one with what the policy left. All rows step together, so the
policy evicts after every token as it would while serving.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvgate.engine.engine import Engine
from kvgate.engine.sequence import Sequence as Row
from kvgate.evals.log.records import FidelityRecord

DIGITS = 6  # nats are recorded to a millionth; below that is rounding of fp32


@dataclass
class Followed:
    """What one row predicted along the exact answer.

    Attributes:
        tokens: its own most likely token at each position where the exact answer has one.
        agree: whether that is the exact run's, at each of these and where the answer ended.
        kl: KL(exact || row) in nats at the same positions; None where the row's logits held a NaN.
        pending: exact ids that were not fed to the model yet. ``capped``: the exact answer was cut at its limit.
    """

    tokens: list[int] = field(default_factory=list)
    agree: list[bool] = field(default_factory=list)
    kl: list[float | None] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    capped: bool = False
    nan: bool = False

    @property
    def agreement(self) -> float:
        """Share of positions with the exact run's most likely token, in [0, 1]; 0 where the exact run had none."""
        return sum(self.agree) / len(self.agree) if self.agree else 0.0

    @property
    def record(self) -> FidelityRecord:
        """What is written down besides the tokens."""
        diverged = self.agree.index(False) if False in self.agree else None
        return FidelityRecord(tuple(self.kl), diverged, self.agree[-1] if len(self.agree) > len(self.tokens) else None)


def follow(
    engine: Engine,
    rows: Sequence[Row],
    leaders: Sequence[int],
    logits: Tensor,
    limits: Sequence[int],
    stops: Sequence[frozenset[int]],
) -> list[Followed]:
    """Continue all rows along what the exact ones among them say.

    Args:
        leaders: for each row, the place of the exact row on the same item; an exact row leads itself.
        logits: fp32 ``[R, V]`` after each row's last token.
        limits, stops: of each row's item, as for :func:`kvgate.engine.generate.generate`.
    """
    found = [Followed() for _ in rows]
    active = list(range(len(rows)))
    while active:
        place = {index: at for at, index in enumerate(active)}
        lead = [place[leaders[index]] for index in active]
        chosen = logits.argmax(-1).tolist()
        kl, broken = divergences(logits, lead), logits.isnan().any(-1).tolist()
        going = []
        for at, index in enumerate(active):
            spoken = chosen[lead[at]]
            if broken[lead[at]]:  # the exact run has nothing to say any more
                found[index].nan, found[index].pending = True, []
                continue
            ended = spoken in stops[index]
            _note(found[index], chosen[at], spoken, kl[at], ended)
            found[index].capped = not ended and len(found[index].tokens) >= limits[index]
            if not ended and not found[index].capped:
                going.append(index)
        active = going
        if active:
            logits = engine.extend([rows[index] for index in active], [found[index].pending for index in active])
    return found


def _note(row: Followed, own: int, spoken: int, kl: float | None, ended: bool) -> None:
    row.agree.append(kl is not None and own == spoken)
    row.kl.append(kl)
    row.nan |= kl is None
    row.pending = [] if ended else [spoken]
    if not ended:
        row.tokens.append(own)


def divergences(logits: Tensor, lead: Sequence[int]) -> list[float | None]:
    """KL(p_lead || p_row) in nats for each row of fp32 ``[R, V]``; ``lead`` gives each row's exact one.

    None where it is not a number: a NaN in the logits, or a token that the row thinks impossible.
    """
    logs = torch.log_softmax(logits, -1)
    exact = logs[list(lead)]
    weight = exact.exp()
    terms = torch.where(weight > 0, weight * (exact - logs), 0.0)
    found = terms.sum(-1).clamp_min(0.0).tolist()  # rounding may fall below 0
    return [round(value, DIGITS) if math.isfinite(value) else None for value in found]
