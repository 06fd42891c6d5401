"""Rows that share pages: nobody sees what another does, nothing leaks, and what goes wrong leaves everything usable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import pytest
import torch

from kvgate.compressors.contract import PolicyViolation
from kvgate.compressors.evidence import Evidence, Keep, LastQueries, Need, Span
from kvgate.compressors.h2o import H2O
from kvgate.compressors.policy import BudgetTooSmall, Policy
from kvgate.compressors.sliding_window import SlidingWindow
from kvgate.compressors.streaming_llm import StreamingLLM
from kvgate.engine.engine import Engine
from kvgate.engine.sequence import Sequence
from kvgate.lifecycle.pool import OutOfPages, PageError

Fixture = Callable[..., Any]
POLICIES: list[Policy] = [
    SlidingWindow(9), StreamingLLM(6, 4), H2O(5, 5), StreamingLLM(6, 4, "rebased"), H2O(12, 1),
]  # fmt: skip
MASS: frozenset[Need] = frozenset({"mass"})


def poison(engine: Engine) -> None:
    """NaN into every slot that no row attends: free pages, dead slots of held pages."""
    attended = torch.zeros(engine.store.k.shape[:2], dtype=torch.bool)
    tables = engine.tables
    for sequence in tables.active.nonzero()[0].tolist():
        width = tables.width([sequence])
        live = torch.from_numpy(tables.live_slots(sequence)).view(*tables.counts.shape[1:], width, -1)
        pages = torch.from_numpy(tables.pages[sequence, :, :, :width]).long()
        held = torch.arange(width) < torch.from_numpy(tables.counts[sequence])[..., None]
        attended[pages[held]] |= live[held]
    engine.store.k[~attended] = torch.nan
    engine.store.v[~attended] = torch.nan


def run_rows(
    engine: Engine, tokens: list[int], *, disturb: Callable[[Engine], None] = lambda engine: None
) -> list[Any]:
    """Every policy beside the exact run, turn after turn; the logits of all of it."""
    parent, last = engine.prefill(tokens[:30], needs=MASS)
    rows = [engine.fork(parent), *(engine.fork(parent, policy) for policy in POLICIES)]
    engine.release(parent)
    for row in rows[1:]:
        engine.evict(row, compact=True)
    seen = [last]
    for at, count in ((30, 1), (31, 6), (37, 1), (38, 1), (39, 9), (48, 1), (49, 1)):
        disturb(engine)
        seen.append(engine.extend(rows, [tokens[at : at + count]] * len(rows)))
        engine.tables.check()
    for row in rows:
        engine.release(row)
    engine.tables.check()
    assert engine.tables.pool.free == engine.tables.pool.total
    return seen


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_dead_slots_and_free_pages_are_never_read(tiny: Fixture, text: Fixture, architecture: str) -> None:
    model, tokens = tiny(architecture), text(50)
    clean = run_rows(model.engine(), tokens)
    dirty_engine = model.engine()
    poison(dirty_engine)
    dirty = run_rows(dirty_engine, tokens, disturb=poison)
    for got, want in zip(dirty, clean, strict=True):
        assert torch.equal(got, want)


def test_used_pages_give_what_fresh_pages_give(tiny: Fixture, text: Fixture) -> None:
    """State of one item must not leak into the next: the second run reuses the first one's pages and ids."""
    engine = tiny("llama").engine(pages=400)
    first = run_rows(engine, text(50))
    run_rows(engine, text(50, 1))
    again = run_rows(engine, text(50))
    for got, want in zip(again, first, strict=True):
        assert torch.equal(got, want)


def test_mass_of_a_reused_slot_starts_from_nothing(tiny: Fixture, text: Fixture) -> None:
    engine = tiny("llama").engine()
    parent, _ = engine.prefill(text(30), needs=MASS)
    row = engine.fork(parent, H2O(3, 3))
    engine.evict(row, compact=True)
    for token in text(40, 1):
        engine.extend([row], [[token]])
        seen = engine.evidence(row)
        assert seen.mass is not None
        assert (seen.mass[~seen.live] == 0).all()
        newest = seen.live & (seen.positions == row.length - 1)
        assert (seen.mass[newest] <= 3).all(), "one query of three heads cannot give a new token more than 3"
        assert int(engine.tables.counts[row.id].max()) <= 2, "evicted slots are used again, no page is added"


def test_forks_do_not_influence_each_other_or_their_parent(tiny: Fixture, text: Fixture) -> None:
    """Bit for bit, whatever the others were fed, at the very same pages."""
    engine = tiny("llama").engine()
    tokens = text(60)
    parent, _ = engine.prefill(tokens[:29], needs=MASS)
    alone = engine.fork(parent)
    want = [engine.extend([alone], [[token]]) for token in tokens[29:40]]
    forks = [engine.fork(parent, policy) for policy in POLICIES]
    witness = engine.fork(parent)
    got = []
    for step, token in enumerate(tokens[29:40]):
        for index, row in enumerate(forks):
            if step == 3:
                engine.evict(row, compact=True)
            engine.extend([row], [text(1 + index, step)])
        got.append(engine.extend([witness], [[token]]))
    assert torch.equal(torch.cat(got), torch.cat(want))
    assert parent.length == 29
    late = engine.fork(parent)
    assert torch.equal(engine.extend([late], [[tokens[29]]]), want[0])
    for row in (parent, alone, witness, late, *forks):
        engine.release(row)
    engine.tables.check()
    assert engine.tables.pool.free == engine.tables.pool.total


def test_what_the_neighbours_say_changes_no_bit(tiny: Fixture, text: Fixture) -> None:
    """Same shapes in the batch, other tokens and policies beside it."""
    engine = tiny("llama").engine()
    seen = []
    for seed, neighbour in ((1, POLICIES[0]), (2, POLICIES[3])):
        watched, _ = engine.prefill(text(30))
        other, _ = engine.prefill(text(25, seed))
        rows = [watched, engine.fork(other, neighbour)]
        seen.append([engine.extend(rows, [text(3, step), text(2, seed + step)])[0] for step in range(6)])
        for row in (*rows, other):
            engine.release(row)
    assert all(torch.equal(one, two) for one, two in zip(*seen, strict=True))


def test_the_order_of_rows_does_not_matter(tiny: Fixture, text: Fixture) -> None:
    model, tokens = tiny("llama"), text(50)
    results = []
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        engine = model.engine()
        parent, _ = engine.prefill(tokens[:30], needs=MASS)
        rows = {index: engine.fork(parent, POLICIES[index]) for index in order}
        found: dict[int, list[torch.Tensor]] = {index: [] for index in order}
        for step in range(8):
            new = [text(1 + (index + step) % 3, index) for index in order]
            for index, logits in zip(order, engine.extend([rows[i] for i in order], new), strict=True):
                found[index].append(logits)
        results.append(found)
    for index in range(5):
        for one, two in zip(results[0][index], results[1][index], strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=1e-5)


def test_every_position_stands_once_over_many_turns(tiny: Fixture, text: Fixture, live_tokens: Fixture) -> None:
    """Elsewhere a second turn on the compressed cache was not compressed and its positions overlapped."""
    engine = tiny("llama").engine()
    parent, _ = engine.prefill(text(30), needs=MASS, protected=(Span(3, 5),))
    rows = [engine.fork(parent, policy) for policy in POLICIES[:3]]
    for turn in range(6):
        engine.extend(rows, [text(3 + turn, turn)] * 3)
        before = [row.evicted for row in rows]
        for token in text(4, turn + 50):
            engine.extend(rows, [[token]] * 3)
        for row, evicted in zip(rows, before, strict=True):
            assert row.evicted > evicted, "every turn evicts"
            for heads in live_tokens(engine, row):
                for head in heads:
                    assert len(set(head)) == len(head) <= row.policy.budget
                    assert {3, 4} <= set(head)
                    assert head[-1] == row.length - 1
            engine.compact(row)


# -- ownership and misuse -------------------------------------------------------------------------------------------


def test_releasing_twice_raises_even_when_the_id_is_in_use_again(tiny: Fixture, text: Fixture) -> None:
    engine = tiny("llama").engine()
    row, _ = engine.prefill(text(20))
    engine.release(row)
    other, _ = engine.prefill(text(20, 1))
    assert other.id == row.id, "ids are used again, which is what makes this dangerous"
    for use in (
        lambda: engine.release(row),
        lambda: engine.extend([row], [[3]]),
        lambda: engine.fork(row),
        lambda: engine.evict(row),
    ):
        with pytest.raises(PageError, match="was released"):
            use()
    engine.extend([other], [[4]])
    engine.tables.check()


def test_fork_refuses_a_policy_that_cannot_work(tiny: Fixture, text: Fixture) -> None:
    engine = tiny("llama").engine()
    row, _ = engine.prefill(text(20), protected=(Span(0, 6), Span(10, 12)))
    with pytest.raises(ValueError, match="policy h2o: needs mass, not collected during prefill"):
        engine.fork(row, H2O(10, 10))
    with pytest.raises(BudgetTooSmall, match=r"budget 8 is too small for 8 protected and sink tokens .* at least 9"):
        engine.fork(row, SlidingWindow(8))
    with pytest.raises(ValueError, match="does not continue the sinks"):
        engine.fork(row, StreamingLLM(20, 4, "rebased"))
    engine.tables.check()
    assert int(engine.tables.active.sum()) == 1


@pytest.mark.parametrize("architecture", ["cohere", "gpt2", "smollm3"])
def test_rebased_is_refused_where_queries_cannot_be_turned_back(
    tiny: Fixture, text: Fixture, architecture: str
) -> None:
    """Interleaved rotation, learned positions, layers without rotation: each would be silently wrong."""
    engine = tiny(architecture).engine()
    row, _ = engine.prefill(text(20))
    with pytest.raises(ValueError, match=r"positions: rebased is not possible with .* use positions: original"):
        engine.fork(row, StreamingLLM(8, 4, "rebased"))
    engine.fork(row, StreamingLLM(8, 4))


def test_bad_steps_are_refused_before_anything_changes(tiny: Fixture, text: Fixture) -> None:
    engine = tiny("llama").engine(pages=600)
    row, _ = engine.prefill(text(250))
    before = engine.tables.pool.free
    with pytest.raises(ValueError, match="257 tokens: the model has 256 positions"):
        engine.extend([row], [text(7)])
    with pytest.raises(ValueError, match="no new tokens"):
        engine.extend([row], [[]])
    with pytest.raises(PageError, match="twice"):
        engine.extend([row, row], [[3], [4]])
    with pytest.raises(ValueError, match="has no tokens"):
        engine.prefill([])
    with pytest.raises(ValueError, match="257 tokens, but the model has 256 positions"):
        engine.prefill(text(257))
    assert engine.tables.pool.free == before
    engine.extend([row], [text(6)])
    engine.tables.check()


def test_running_out_of_pages_changes_nothing(tiny: Fixture, text: Fixture) -> None:
    """2 layers x 2 heads x 3 pages for the prompt; a fork that must copy or grow finds no page."""
    model, tokens = tiny("llama"), text(60)
    engine = model.engine(pages=13)
    with pytest.raises(OutOfPages):
        engine.prefill(tokens)
    assert engine.tables.pool.free == 13
    row, _ = engine.prefill(tokens[:20])
    fork = engine.fork(row)
    with pytest.raises(OutOfPages):
        engine.extend([fork], [[tokens[20]]])
    with pytest.raises(OutOfPages):
        engine.extend([row, fork], [tokens[20:30], tokens[20:22]])
    engine.tables.check()
    assert engine.tables.pool.free == 1
    engine.release(row)
    got = engine.extend([fork], [tokens[20:22]])[0]
    torch.testing.assert_close(got, model.logits(tokens[:22])[-1], rtol=0, atol=1e-4)
    engine.release(fork)
    assert engine.tables.pool.free == 13


@pytest.mark.parametrize("count", [1, 11])
def test_a_forward_pass_that_fails_is_taken_back(
    tiny: Fixture, text: Fixture, live_tokens: Fixture, count: int
) -> None:
    """A token id beyond the vocabulary fails inside the model, after slots were handed out."""
    model, tokens = tiny("llama"), text(50)
    engine = model.engine()
    parent, _ = engine.prefill(tokens[:20], needs=MASS)
    rows = [engine.fork(parent), engine.fork(parent, H2O(6, 5)), engine.fork(parent, SlidingWindow(7))]
    engine.evict(rows[1], compact=True)
    twins = [engine.fork(row) for row in rows]
    before = [live_tokens(engine, row) for row in rows]
    with pytest.raises(IndexError):
        engine.extend(rows, [[*tokens[20 : 19 + count], 10_000]] * 3)
    engine.tables.check()
    assert [live_tokens(engine, row) for row in rows] == before
    assert [row.length for row in rows] == [20] * 3
    for at in range(20, 50, 3):
        got = engine.extend(rows, [tokens[at : at + 3]] * 3)
        want = engine.extend(twins, [tokens[at : at + 3]] * 3)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
        for row, twin in zip(rows, twins, strict=True):
            assert live_tokens(engine, row) == live_tokens(engine, twin)
    for row in (parent, *rows, *twins):
        engine.release(row)
    engine.tables.check()
    assert engine.tables.pool.free == engine.tables.pool.total


def test_a_prefill_that_fails_gives_its_pages_back(tiny: Fixture, text: Fixture) -> None:
    engine = tiny("llama").engine(prefill_chunk=8)
    with pytest.raises(IndexError):
        engine.prefill([*text(20), 10_000])
    engine.tables.check()
    assert engine.tables.pool.free == engine.tables.pool.total
    assert not engine.tables.active.any()


@dataclass(frozen=True)
class Odd(Policy):
    """Counts its decisions in the sequence's state and misbehaves on demand."""

    name: ClassVar[str] = "odd"
    size: int = 6
    fail_at: int | None = None
    revive: bool = field(default=False)

    @classmethod
    def for_budget(cls, budget: int, **params: Any) -> Self:
        return cls(budget)

    @property
    def budget(self) -> int:
        return self.size

    def decide(self, evidence: Evidence) -> Keep:
        asked = (evidence.state or 0) + 1
        if asked == self.fail_at:
            raise RuntimeError("a policy with a bug")
        if self.revive:
            return Keep(torch.ones_like(evidence.live), asked)
        return Keep(SlidingWindow(self.size).decide(evidence).slots, asked)


def test_a_policy_that_raises_loses_no_page(tiny: Fixture, text: Fixture) -> None:
    engine = tiny("llama").engine()
    parent, _ = engine.prefill(text(30), needs=MASS)
    rows = [engine.fork(parent, Odd(fail_at=2)), engine.fork(parent, SlidingWindow(6)), engine.fork(parent, H2O(3, 3))]
    for row in rows:
        engine.evict(row)
    with pytest.raises(RuntimeError, match="a policy with a bug"):
        engine.extend(rows, [[5]] * 3)
    engine.tables.check()
    engine.extend(rows[1:], [[6]] * 2)
    assert all(int(engine.tables.live_counts(row.id).max()) <= 6 for row in rows[1:])
    for row in (parent, *rows):
        engine.release(row)
    assert engine.tables.pool.free == engine.tables.pool.total


def test_a_policy_that_wants_dead_slots_back_is_stopped_with_nothing_changed(tiny: Fixture, text: Fixture) -> None:
    engine = tiny("llama").engine()
    parent, _ = engine.prefill(text(30))
    row = engine.fork(parent, Odd(revive=True))
    with pytest.raises(PolicyViolation, match="policy odd: keeps slots that are not live"):
        engine.evict(row)
    assert (row.evicted, row.tainted, row.state) == (0, False, None)
    engine.tables.check()


def test_state_belongs_to_the_sequence_and_stays_with_its_policy(tiny: Fixture, text: Fixture) -> None:
    engine = tiny("llama").engine()
    policy = Odd()
    parent, _ = engine.prefill(text(30), needs=MASS)
    one, two = engine.fork(parent, policy), engine.fork(parent, policy)
    for _ in range(3):
        engine.extend([one], [[5]])
    engine.extend([two], [[5]])
    assert (one.state, two.state, parent.state) == (3, 1, None)
    heir = engine.fork(one)
    engine.extend([heir], [[5]])
    assert (heir.state, one.state) == (4, 3)
    stranger = engine.fork(one, SlidingWindow(4))
    assert stranger.state is None
    assert stranger.tainted, "taint and the count of the evicted stay with the pages"


def test_rows_without_mass_or_queries_carry_none(tiny: Fixture, text: Fixture) -> None:
    engine = tiny("llama").engine()
    parent, _ = engine.prefill(text(30), needs=frozenset({"mass", LastQueries(32)}))
    assert parent.mass is not None
    row: Sequence = engine.fork(parent, SlidingWindow(5))
    engine.extend([row], [[5]])
    assert row.mass is None
    assert row.queries is None
    assert engine.evidence(row).keys is None


def test_the_exact_run_frees_nothing_and_is_never_tainted(tiny: Fixture, text: Fixture, live_tokens: Fixture) -> None:
    engine = tiny("llama").engine()
    row, _ = engine.prefill(text(30))
    engine.extend([row], [text(9, 1)])
    assert live_tokens(engine, row) == [[list(range(39))] * 2] * 2
    assert engine.resident_pages(row) == 2 * 2 * 5
    assert engine.live_tokens(row) == 2 * 2 * 39
    assert not row.tainted
    with pytest.raises(AssertionError, match="no policy"):
        engine.evict(row)
