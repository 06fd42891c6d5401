"""What a policy is shown of a row."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass

import torch
from torch import Tensor

from kvgate.compressors.evidence import Evidence, LastQueries, Model, Need, Observed, QueryMoments
from kvgate.engine.models import LoadedModel
from kvgate.engine.rotation import Rotation
from kvgate.engine.sequence import Sequence
from kvgate.engine.slots import Slots


@dataclass(frozen=True)
class Scores:
    """A policy's scores fp32 ``[L, H, S]`` of a row's slots, and the extra tokens that were run for them."""

    slots: Tensor
    probed: int


class Witness:
    """Makes Evidence of rows, and knows the model's constants.

    ``logit_rule``: scale and softcap of the model's attention, as it last used them.
    """

    def __init__(self, loaded: LoadedModel, slots: Slots) -> None:
        self._info = loaded.info
        self._tokenizer = loaded.tokenizer
        self._slots = slots
        self.rotation = Rotation(loaded.module, loaded.info)
        self.logit_rule: tuple[float, float | None] = (loaded.info.head_dim**-0.5, None)

    def evidence(self, row: Sequence, needs: frozenset[Need], probe: Callable[[Several[int]], Observed]) -> Evidence:
        """What a policy with these ``needs`` may look at. ``probe`` runs extra tokens over the row's cache."""
        queries = max((need.count for need in needs if isinstance(need, LastQueries)), default=0)
        moments = [row.moments[need.skip] for need in needs if isinstance(need, QueryMoments) and row.moments]
        pages, positions, live = self._slots.table(row)
        store = self._slots.store
        return Evidence(
            positions=torch.from_numpy(positions).to(store.device),
            live=torch.from_numpy(live).to(store.device),
            length=row.length,
            protected=row.protected,
            mass=row.mass[..., : positions.shape[-1]] if row.mass is not None and "mass" in needs else None,
            queries=row.queries[:, :, -queries:] if row.queries is not None and queries else None,
            moments=moments[0].moments() if moments else None,
            keys=(lambda: store.gather(store.k, pages)) if "keys" in needs else None,
            values=(lambda: store.gather(store.v, pages)) if "values" in needs else None,
            tokens=row.tokens if "probe" in needs else (),
            probe=probe if "probe" in needs else None,
            model=Model(*self.logit_rule, self._info.native_windows, self._encode, self.rotation),
            page_size=self._slots.page_size,
            exact_slots=self._slots.exact(row.length),
            state=row.state,
        )

    def _encode(self, text: str) -> list[int]:
        if self._tokenizer is None:
            raise ValueError(f"model {self._info.name!r}: came without a tokenizer, which this policy's probe needs")
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids
