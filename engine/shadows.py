"""Rows that run beside served ones and are compared with them, step by step, in the same batch.

A shadow begins as a fork of its request's row, one token before the end of the prompt, under the other policy. From
then on it is fed the tokens of the request's answer, so that every step compares two distributions over the same text.
From the first token that it would have chosen otherwise, a second fork may write an answer of its own.

Shadows hold pages outside of all promises. They take what is spare, and give way as soon as a request could use it;
a comparison that was given up says so and counts as missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvgate.compressors.policy import Policy
from kvgate.engine.sequence import Sequence
from kvgate.engine.served import Served
from kvgate.engine.serving_store import EngineStore


@dataclass(frozen=True)
class Compared:
    """What a shadow showed.

    Attributes:
        tokens: tokens of the answer that were compared. agreed: those that the shadow would have chosen too.
        kl_mean, kl_max: KL divergence in nats of the policy's distribution from the exact one, over these tokens.
        own: the shadow's own answer, stop id excluded; None where it was not asked for, or is the request's.
        evicted: slots its policy evicted, or that of the request where the shadow is the exact one.
        missing: why the comparison is incomplete, if it is.
    """

    tokens: int
    agreed: int
    kl_mean: float
    kl_max: float
    own: tuple[int, ...] | None
    evicted: int
    missing: str | None = None


@dataclass
class _Own:
    """An answer of the shadow's own."""

    row: Sequence
    tokens: list[int]
    pending: int
    done: bool = False


@dataclass
class _Shadow:
    served: Served
    row: Sequence
    tokens: int = 0
    agreed: int = 0
    kl_sum: float = 0.0
    kl_max: float = 0.0
    own: _Own | None = None
    ended: bool = False


class Shadows:
    """All shadows of a serving loop. ``report(id, compared)`` is called once for each that was begun."""

    def __init__(self, store: EngineStore, report: Callable[[str, Compared], None]) -> None:
        self._store = store
        self._report = report
        self._live: dict[str, _Shadow] = {}

    def __len__(self) -> int:
        return len(self._live)

    def begin(self, slot: int, served: Served) -> None:
        """Fork the slot's row. A policy that cannot take it over leaves the comparison missing."""
        beside = served.beside
        assert beside is not None, "no comparison was asked for"
        if served.policy is not None and self._store.spare_pages() < self._to_gather(slot):
            # The row's policy will gather what it keeps while the shadow holds on to all pages.
            self._report(served.spec.id, Compared(0, 0, 0.0, 0.0, None, 0, "no pages to spare"))
            return
        try:
            row = self._fork(self._store.rows[slot], beside.policy)
        except ValueError as error:
            self._report(served.spec.id, Compared(0, 0, 0.0, 0.0, None, 0, str(error)))
            return
        shadow = _Shadow(served, row)
        self._live[served.spec.id] = shadow
        try:
            self._store.engine.settle(row)
        except Exception as error:
            self._give_up(shadow, f"{type(error).__name__}: {error}")

    def rows(self, fed: Iterable[tuple[Served, list[int]]]) -> list[tuple[str, Sequence, list[int]]]:
        """What to feed beside ``fed`` (requests and their tokens): the same tokens to their shadows."""
        pairs = [(self._live.get(served.spec.id), tokens) for served, tokens in fed]
        return [(s.served.spec.id, s.row, tokens) for s, tokens in pairs if s is not None and not s.ended]

    def own_rows(self) -> list[tuple[str, Sequence, list[int]]]:
        """What to feed to shadows that write answers of their own."""
        return [
            (id, shadow.own.row, [shadow.own.pending])
            for id, shadow in self._live.items()
            if shadow.own is not None and not shadow.own.done
        ]

    @property
    def writing(self) -> bool:
        """Whether shadows still write answers of their own."""
        return any(shadow.own is not None and not shadow.own.done for shadow in self._live.values())

    def compare(self, id: str, exact: Tensor, other: Tensor | Exception, token: int) -> None:
        """One step: logits ``[V]`` of the request and of its shadow over the same text; the request chose ``token``."""
        shadow = self._live[id]
        if isinstance(other, Exception):
            self._give_up(shadow, f"{type(other).__name__}: {other}")
            return
        p, q = (exact, other) if shadow.row.policy is not None else (other, exact)
        kl = float(torch.nn.functional.kl_div(q.log_softmax(-1), p.log_softmax(-1), reduction="sum", log_target=True))
        shadow.kl_sum += kl
        shadow.kl_max = max(shadow.kl_max, kl)
        chosen = shadow.served.sink.choose(other, shadow.served.fed)
        shadow.tokens += 1
        shadow.agreed += chosen == token
        beside = shadow.served.beside
        if chosen != token and shadow.own is None and beside is not None and beside.answer:
            before = [*shadow.served.fed]
            own = _Own(self._fork(shadow.row), before, chosen)
            shadow.own = own
            self._take(shadow, own, chosen)

    def wrote(self, id: str, logits: Tensor | Exception) -> None:
        """One step of a shadow's own answer."""
        shadow = self._live[id]
        own = shadow.own
        assert own is not None, "it writes no answer"
        if isinstance(logits, Exception):
            self._give_up(shadow, f"{type(logits).__name__}: {logits}")
            return
        self._take(shadow, own, shadow.served.sink.choose(logits, own.tokens))
        self._finish(shadow)

    def ended(self, id: str, missing: str | None) -> None:
        """The request ended; ``missing`` says why its answer is not whole, if it is not."""
        shadow = self._live.get(id)
        if shadow is None:
            return
        if missing is not None:
            self._give_up(shadow, missing)
            return
        shadow.ended = True
        self._finish(shadow)

    def fit(self, running: int) -> None:
        """Before a round of ``running`` rows: the youngest shadows go until all can grow without touching promises."""
        heads = self._store.engine.tables.geometry.heads
        while self._live:
            rows = sum(1 + (shadow.own is not None) for shadow in self._live.values())
            # A shadow's step takes at most one new page a head and one copy of a shared one.
            room = self._store.spare_pages() - 2 * heads * rows
            if room >= 0 and self._store.available() - 2 * rows >= running:
                return
            self._give_up(self._live[next(reversed(self._live))], "no pages to spare")

    # -- inside -----------------------------------------------------------------------------------------------------

    def _fork(self, row: Sequence, policy: Policy | None = None) -> Sequence:
        """A row beside ``row`` that shares its pages, outside of all promises."""
        made = self._store.engine.fork(row, policy)
        self._store.shadows.append(made)
        return made

    def _to_gather(self, slot: int) -> int:
        """Most pages that copying what the slot's row keeps can take, and a step of two rows."""
        return (self._store.blocks_held(slot) + 4) * self._store.engine.tables.geometry.heads

    def _take(self, shadow: _Shadow, own: _Own, token: int) -> None:
        own.pending = token
        if token in shadow.served.stops:
            own.done = True
            return
        own.tokens.append(token)
        own.done = len(own.tokens) >= shadow.served.spec.max_tokens

    def _finish(self, shadow: _Shadow) -> None:
        if shadow.ended and (shadow.own is None or shadow.own.done):
            own = tuple(shadow.own.tokens) if shadow.own is not None else None
            self._drop(shadow, own)

    def _give_up(self, shadow: _Shadow, why: str) -> None:
        self._drop(shadow, None, why)

    def _drop(self, shadow: _Shadow, own: tuple[int, ...] | None, missing: str | None = None) -> None:
        del self._live[shadow.served.spec.id]
        evicted = shadow.row.evicted
        for row in (shadow.row, *([shadow.own.row] if shadow.own is not None else [])):
            self._store.drop(row, self._store.ledger.fences.tickets())
        mean = shadow.kl_sum / shadow.tokens if shadow.tokens else 0.0
        self._report(
            shadow.served.spec.id,
            Compared(shadow.tokens, shadow.agreed, mean, shadow.kl_max, own, evicted, missing),
        )
