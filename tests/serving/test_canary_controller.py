"""The canary controller without a server: evidence, states, journal, orders."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgate.evals.leaderboard.rollout import Limits, Rollout, Stage
from kvgate.evals.stats.betting import log_e_block, log_e_pass
from kvgate.serving.canary.controller import Controller
from kvgate.serving.canary.evidence import STARTS, Stream
from kvgate.serving.canary.journal import Journal, MemoryJournal
from kvgate.serving.canary.progress import Judge
from kvgate.serving.canary.seen import Seen

QUICK = Rollout(stages=(Stage(0.05, 20), Stage(0.5, 250)), shadow_pairs=150, idle_s=1.0, watch_fraction=1.0)
JUDGE = Judge(QUICK, margin=0.03, alpha=0.05, longest=999)


def made(judge: Judge = JUDGE, journal: Journal | MemoryJournal | None = None, verdict: str = "v1") -> Controller:
    return Controller(judge, journal or MemoryJournal(), verdict, 0.0)


Making = Callable[[int, Seen], Seen]


def drive(controller: Controller, conversations: int, change: Making = lambda i, seen: seen, first: int = 0) -> int:
    """One-turn conversations, two seconds apart. Returns how many were answered under the policy."""
    exposed = 0
    for i in range(first, first + conversations):
        name = f"c{i}"
        seen = Seen(name, controller.arm(name), 100 + 3 * (i % 250), first_token_s=0.1, gap_s=0.02)
        seen = replace(seen, quality=0.0) if controller.compares(name) else seen
        seen = change(i, seen)
        exposed += seen.arm == "canary"
        controller.observe(seen, 2.0 * i)
        controller.tick(2.0 * i + 1.5)
        if controller.progress.state == "rolled_back":
            break
    return exposed


# -- evidence --------------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.25, 1.0]), max_size=60), st.sampled_from([0.01, 0.03, 0.1]))
@settings(max_examples=60, deadline=None)
def test_streams_are_the_gate_s_own_processes(values: list[float], margin: float) -> None:
    stream = Stream(margin)
    for value in values:
        stream.add(value)
    assert stream.log_pass == pytest.approx(log_e_pass(values, margin), abs=1e-9)
    whole = log_e_block(values, margin)
    late = [log_e_block(values[start:], margin) for start in STARTS[1:]]
    mixed = np.logaddexp.reduce([whole + np.log(0.5), *[x + np.log(0.5 / len(late)) for x in late]])
    assert stream.log_block == pytest.approx(mixed, abs=1e-9)


def test_a_difference_out_of_range_is_refused() -> None:
    for value in (1.5, float("nan")):
        with pytest.raises(ValueError, match=r"\[-1, 1\]"):
            Stream(0.03).add(value)


# -- routing ---------------------------------------------------------------------------------------------------------


def test_routing_is_sticky_and_grows() -> None:
    controller = made()
    names = [f"c{i}" for i in range(4000)]
    assert {controller.arm(name) for name in names} == {"exact"}
    shares = []
    before: set[str] = set()
    for _ in range(3):
        progress = controller.progress
        progress._move(progress.next_step("by hand"), 0.0)
        canary = {name for name in names if controller.arm(name) == "canary"}
        assert before <= canary, "who is in stays in"
        before = canary
        shares.append(len(canary) / len(names))
    assert shares == pytest.approx([0.05, 0.5, 1.0], abs=0.03)
    other = made(verdict="v2")
    other.progress._move(other.progress.next_step(""), 0.0)
    assert {n for n in names if other.arm(n) == "canary"} != before, "another verdict draws other conversations"


# -- states ----------------------------------------------------------------------------------------------------------


def test_a_good_policy_goes_through_all_states() -> None:
    controller = made()
    drive(controller, 1600)
    assert controller.progress.state == "full"
    moves = [event.data["state"] for event in controller.progress.history if event.kind == "move"]
    assert moves == ["canary", "canary", "full"]
    assert controller.arm("whoever") == "canary"


def test_a_verdict_for_shadows_only_never_carries_traffic() -> None:
    controller = made(replace(JUDGE, shadow_only=True))
    assert drive(controller, 600) == 0
    assert controller.progress.state == "shadow"
    assert "shadows only" in str(controller.progress.waiting())


@pytest.mark.parametrize("lost", ["no pages to spare", float("nan")])
def test_missing_data_and_nan_pause_and_never_pass(lost: str | float) -> None:
    def change(i: int, seen: Seen) -> Seen:
        if seen.quality is None or i % 5:
            return seen
        return replace(seen, quality=None, missing=lost) if isinstance(lost, str) else replace(seen, quality=lost)

    controller = made()
    drive(controller, 800, change)
    assert controller.progress.state == "shadow"
    assert "missing" in str(controller.progress.waiting())
    drive(controller, 800, first=800)
    assert controller.progress.state != "shadow", "it goes on once data come again"


def test_no_comparison_at_all_never_passes() -> None:
    controller = made()
    drive(controller, 800, lambda i, seen: replace(seen, quality=None))
    assert controller.progress.state == "shadow"
    assert "0 of 150 pairs" in str(controller.progress.waiting())


def test_unknown_times_never_pass() -> None:
    controller = made()
    drive(controller, 800, lambda i, seen: replace(seen, first_token_s=None))
    assert controller.progress.state == "canary"
    assert controller.progress.stage == 0
    assert "times" in str(controller.progress.waiting())


GUARD_FAULTS: dict[str, Making] = {
    "failures": lambda i, seen: replace(seen, failed=True, quality=None, missing=None),
    "allocation_failures": lambda i, seen: replace(seen, allocation_failure=True),
    "preemptions": lambda i, seen: replace(seen, preemptions=2.0),
    "recomputed_tokens": lambda i, seen: replace(seen, recomputed=0.4),
    "slow_first_token": lambda i, seen: replace(seen, first_token_s=5.0),
    "slow_between_tokens": lambda i, seen: replace(seen, gap_s=1.0),
}


@pytest.mark.parametrize("guard", GUARD_FAULTS)
def test_each_guard_rolls_back_beside_the_exact_arm(guard: str) -> None:
    def only_canary(i: int, seen: Seen) -> Seen:
        return GUARD_FAULTS[guard](i, seen) if seen.arm == "canary" else seen

    controller = made()
    exposed = drive(controller, 2000, only_canary)
    assert controller.progress.state == "rolled_back"
    assert controller.progress.why.startswith(guard)
    assert exposed <= 40
    assert controller.arm("c1") == "exact"
    assert not controller.compares("c1")


@pytest.mark.parametrize("guard", GUARD_FAULTS)
def test_what_both_arms_suffer_is_no_fault_of_the_policy(guard: str) -> None:
    def both(i: int, seen: Seen) -> Seen:
        return GUARD_FAULTS[guard](i, seen) if i % 10 == 3 and guard != "failures" else seen

    controller = made()
    drive(controller, 900, both)
    assert controller.progress.state != "rolled_back"


def test_a_loss_in_one_third_of_the_lengths_is_found() -> None:
    controller = made()
    drive(controller, 3000, lambda i, seen: replace(seen, quality=-1.0 if seen.tokens > 700 else 0.0))
    assert controller.progress.state == "rolled_back"


def test_a_conversation_counts_once_with_its_mean() -> None:
    controller = made()
    for turn in range(10):
        controller.observe(Seen("c", "exact", 50, quality=-1.0 if turn < 5 else 0.0), 0.1 * turn)
    assert controller.progress.pairs == 0
    controller.tick(10.0)
    assert controller.progress.pairs == 1
    assert controller.progress.streams["quality"].mean == -0.5


# -- journal and orders ----------------------------------------------------------------------------------------------


def test_state_and_evidence_survive_a_restart(tmp_path: Path) -> None:
    first = made(journal=Journal(tmp_path))
    drive(first, 400)
    again = made(journal=Journal(tmp_path))
    before, after = first.progress, again.progress
    assert after.state == before.state == "canary"
    assert (after.stage, after.pairs, after.arms, after.slow) == (before.stage, before.pairs, before.arms, before.slow)
    for name, stream in before.streams.items():
        assert after.streams[name].log_pass == pytest.approx(stream.log_pass)
        assert after.streams[name].log_block == pytest.approx(stream.log_block)


def test_a_rolled_back_policy_needs_a_new_verdict(tmp_path: Path) -> None:
    first = made(journal=Journal(tmp_path))
    drive(first, 600, lambda i, seen: replace(seen, quality=-1.0))
    assert first.progress.state == "rolled_back"
    same = made(journal=Journal(tmp_path))
    assert (same.progress.state, same.arm("c"), same.compares("c")) == ("rolled_back", "exact", False)
    drive(same, 600)
    assert same.progress.state == "rolled_back"
    other = made(journal=Journal(tmp_path), verdict="v2")
    assert other.progress.state == "shadow"
    assert other.progress.streams["quality"].count == 0


def test_a_crash_at_any_byte_loses_at_most_the_last_event(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for i in range(4):
        journal.append("note", {"text": f"é{i}"}, float(i))
    raw = journal.path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(raw) if byte == 10]
    for cut in range(len(raw) + 1):
        journal.path.write_bytes(raw[:cut])
        found = Journal(tmp_path)
        assert len(found.poll()) == sum(end <= cut for end in ends)
        found.append("note", {"text": "after"}, 9.0)
        assert [e.seq for e in Journal(tmp_path).poll()] == list(range(1, sum(end <= cut for end in ends) + 2))


@pytest.mark.parametrize("damage", ["edited", "removed", "swapped", "rubbish"])
def test_an_edited_journal_is_refused(tmp_path: Path, damage: str) -> None:
    journal = Journal(tmp_path)
    for i in range(4):
        journal.append("pair", {"quality": 0.0, "slice": "short", "n": i}, float(i))
    lines = journal.path.read_text().splitlines(keepends=True)
    if damage == "edited":
        lines[1] = lines[1].replace('"quality": 0.0', '"quality": 1.0')
    elif damage == "removed":
        del lines[1]
    elif damage == "swapped":
        lines[1], lines[2] = lines[2], lines[1]
    else:
        lines[1] = json.dumps({"seq": 2}) + "\n"
    journal.path.write_text("".join(lines))
    with pytest.raises(ValueError, match="line 2"):
        Journal(tmp_path).poll()


def test_two_writers_keep_one_chain(tmp_path: Path) -> None:
    server, person = Journal(tmp_path), Journal(tmp_path)
    server.append("note", {"text": "a"}, 1.0)
    assert [e.seq for e in person.append("note", {"text": "b"}, 2.0)] == [1, 2]
    assert [e.seq for e in server.poll()] == [2]
    assert server.poll() == []


def test_bad_rollouts_are_named() -> None:
    with pytest.raises(ValueError, match="rising shares"):
        Rollout(stages=(Stage(0.5, 1), Stage(0.1, 1)))
    with pytest.raises(ValueError, match="traffic is 0"):
        Stage(0.0, 1)
    with pytest.raises(ValueError, match="failures is 0"):
        Limits(failures=0.0)
    with pytest.raises(ValueError, match="most_missing"):
        Rollout(most_missing=0.0)
