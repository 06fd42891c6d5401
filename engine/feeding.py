"""One round's tokens through the engine: served rows and their shadows in one batch, failing rows set apart."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from kvgate.engine.sequence import Sequence
from kvgate.engine.served import Served
from kvgate.engine.serving_store import EngineStore
from kvgate.engine.shadows import Shadows

Fed = Tensor | Exception


@dataclass(frozen=True)
class Work:
    """A row of the round and the tokens it is fed."""

    slot: int
    served: Served
    row: Sequence
    tokens: list[int]


@dataclass(frozen=True)
class _Part:
    row: Sequence
    tokens: list[int]
    reader: Served | None = None
    first: int = 0


class Feeder:
    """See the module docstring. ``switched(slot)`` is told when a row's policy has taken over."""

    def __init__(self, store: EngineStore, shadows: Shadows, switched: Callable[[int], None]) -> None:
        self._store = store
        self._shadows = shadows
        self._switched = switched
        self._beside: dict[str, Fed] = {}

    def feed(self, work: Several[Work]) -> list[Fed]:
        """Logits ``[V]`` after each row's last token, or why the row failed.

        A row whose prompt ends in this round, and that a policy is about to take over or to be compared under, is fed
        in two parts: up to the prompt's last token, then, policy and shadow in place, the rest.
        """
        cuts = [self._cut(each) for each in work]
        first = [i for i, (each, cut) in enumerate(zip(work, cuts, strict=True)) if cut != 0 and each.tokens]
        early = {i: work[i].tokens[: cuts[i]] for i in first}
        found: dict[int, Fed] = self._both([work[i] for i in first], [early[i] for i in first], first, own=True)
        late = []
        for i, cut in enumerate(cuts):
            if cut is not None and not isinstance(found.get(i), Exception):
                failure = self._switch(work[i])
                if failure is None:
                    late.append(i)
                else:
                    found[i] = failure
        found |= self._both([work[i] for i in late], [work[i].tokens[cuts[i] or 0 :] for i in late], late, own=False)
        return [found[i] for i in range(len(work))]

    def compare(self, served: Served, logits: Tensor, token: int) -> None:
        """The request chose ``token`` from ``logits``: what would its shadow have done?"""
        other = self._beside.pop(served.spec.id, None)
        if other is not None:
            self._shadows.compare(served.spec.id, logits, other, token)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _cut(self, work: Work) -> int | None:
        """Tokens to feed before a policy takes over; None where none does in this round."""
        served = work.served
        wanted = (served.policy is not None and work.row.policy is None) or (served.beside and not served.switched)
        ahead = len(served.prompt) - 1 - work.row.length
        return max(0, ahead) if wanted and ahead < len(work.tokens) else None

    def _switch(self, work: Work) -> Exception | None:
        """Shadow first, since it is forked from what the row has; then the row's own policy."""
        served, engine = work.served, self._store.engine
        try:
            if served.beside is not None and not served.switched:
                self._shadows.begin(work.slot, served)
            served.switched = True
            engine.switch(work.row, served.policy)
            if served.policy is not None:
                self._switched(work.slot)
        except Exception as error:
            return error
        return None

    def _both(
        self, work: Several[Work], tokens: Several[list[int]], keys: Several[int], *, own: bool
    ) -> dict[int, Fed]:
        """Served rows by ``keys``; what shadows answer is kept for :meth:`compare`, their own answers go on."""
        parts = [
            _Part(w.row, t, w.served if w.served.sink.reads_prompt else None, w.row.length)
            for w, t in zip(work, tokens, strict=True)
        ]
        beside = self._shadows.rows((w.served, t) for w, t in zip(work, tokens, strict=True))
        writing = self._shadows.own_rows() if own else []
        parts += [_Part(row, t) for _, row, t in (*beside, *writing)]
        if not parts:
            return {}
        logits = self._run(parts)
        places = iter(logits[len(work) :])
        for id, _, _ in beside:
            self._beside[id] = next(places)
        for id, _, _ in writing:
            self._shadows.wrote(id, next(places))
        return dict(zip(keys, logits, strict=False))

    def _run(self, parts: Several[_Part]) -> list[Fed]:
        """All rows at once; where that fails, one by one, so that one row's trouble stays its own."""
        failures: dict[int, Exception] = {}
        every = any(part.reader is not None for part in parts)
        tokens = [part.tokens for part in parts]
        try:
            logits = self._store.engine.extend([p.row for p in parts], tokens, every=every, failures=failures)
        except Exception as error:
            return [error] if len(parts) == 1 else [self._run([part])[0] for part in parts]
        ends = np.cumsum([len(part) for part in tokens]) if every else np.arange(1, len(parts) + 1)
        found: list[Fed] = [failures.get(i, logits[int(end) - 1]) for i, end in enumerate(ends)]
        for i, part in enumerate(parts):
            if part.reader is not None and i not in failures and part.first < len(part.reader.prompt):
                found[i] = _read(part, logits[int(ends[i]) - len(part.tokens) : int(ends[i])])
        return found


def _read(part: _Part, logits: Tensor) -> Fed:
    assert part.reader is not None, "nobody reads"
    try:
        part.reader.sink.read(part.first, logits)
    except Exception as error:
        return error
    return logits[-1]
