"""Attention of several new tokens as if they were fed one by one: one decode row for each.

The decode kernel sums in an order that depends on a token's own cache only, so a token gets the same bits whether it
came in a whole prompt, in a chunk, alone, or in a recomputation. It reads the cache once for each token, which costs
more than the prefill kernels do.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvgate.kernels import ops
from kvgate.kernels.types import Attention

_MOST_SCRATCH = 64 << 20  # bytes of scores and mass at once


def attend_by_token(
    q_TQD: Tensor,
    pools: tuple[Tensor, Tensor],
    tables: tuple[Tensor, Tensor, Tensor],
    positions: Tensor,
    position_T: Tensor,
    row_start_R1: Tensor,
    *,
    lower_T: Tensor | None,
    q_sink_TQD: Tensor | None,
    exempt_RE2: Tensor | None,
    sink_end_R: Tensor | None,
    want_mass: bool,
    **rules: Any,
) -> Attention:
    """As :func:`kvgate.kernels.ops.extend_attention`; ``tables``: page ids, live words and page counts of the rows."""
    (k, v), (pages, live, held) = pools, tables
    counts = row_start_R1.diff().long()
    row_T = torch.repeat_interleave(torch.arange(len(counts)), counts).to(q_TQD.device)
    slots = pages.shape[-1] * k.shape[1]
    each = 8 * slots * q_TQD.shape[1] if want_mass else 0
    step = max(1, _MOST_SCRATCH // each) if each else len(row_T)
    outs, lses = [], []
    mass: Tensor | None = None
    for first in range(0, len(row_T), step):
        at = slice(first, first + step)
        rows = row_T[at]
        found = ops.decode_attention(
            q_TQD[at], k, v, pages[rows], live[rows], held[rows], positions, position_T[at],
            lower_R=_part(lower_T, at), q_sink_RQD=_part(q_sink_TQD, at), exempt_RE2=_part(exempt_RE2, rows),
            sink_end_R=_part(sink_end_R, rows), want_mass=want_mass, **rules,
        )  # fmt: skip
        outs.append(found.out)
        lses.append(found.lse)
        if found.mass is not None:
            mass = found.mass.new_zeros((len(counts), *found.mass.shape[1:])) if mass is None else mass
            mass.index_add_(0, rows, found.mass)
    return Attention(torch.cat(outs), torch.cat(lses), mass)


def _part(values: Tensor | None, at: slice | Tensor) -> Tensor | None:
    return None if values is None else values[at]
