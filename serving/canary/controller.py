"""The canary controller: routes conversations, takes what became of them, moves the rollout, writes its journal.

Pure but for the journal: time comes in with every call, nothing here knows a server.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, replace

from kvgate.serving.canary.journal import Journal, MemoryJournal
from kvgate.serving.canary.progress import Judge, Move, Progress
from kvgate.serving.canary.seen import GUARDS, Arm, Conversation, Percentile, Seen, Slow

_WAITING = 64  # exact conversations kept for the canary conversations to come


class Controller:
    """See the module docstring. Not thread safe: one owner calls it.

    Args:
        judge: what the rollout is judged by. journal: read first; evidence of the same verdict goes on.
        verdict: names the verdict the canary config came from. now: Unix time in seconds.
    """

    def __init__(
        self, judge: Judge, journal: Journal | MemoryJournal, verdict: str, now: float, label: str = ""
    ) -> None:
        self.progress = Progress(judge)
        self._journal = journal
        self._salt = verdict
        self._open: dict[str, Conversation] = {}
        self._exact: deque[dict[str, float]] = deque(maxlen=_WAITING)
        self._canary: deque[dict[str, float]] = deque(maxlen=_WAITING)
        self._first, self._gap = Percentile(), Percentile()
        for event in journal.poll():
            self.progress.apply(event)
        self._write("begin", {"verdict": verdict, "policy": label, "judge": asdict(judge)}, now)
        self._told = self.progress.exposed

    # -- routing ----------------------------------------------------------------------------------------------------

    def arm(self, conversation: str) -> Arm:
        """Sticky: a conversation stays in its arm while the traffic does not shrink."""
        return "canary" if self._share(conversation, "arm") < self.progress.traffic else "exact"

    def compares(self, conversation: str) -> bool:
        """Whether answers of this conversation are compared with the other arm's."""
        rollout, state = self.progress.judge.rollout, self.progress.state
        if state == "rolled_back":
            return False
        if state == "canary" and self.arm(conversation) == "canary":
            return True
        share = rollout.shadow_fraction if state == "shadow" else rollout.watch_fraction
        return self._share(conversation, "compare") < share

    def _share(self, conversation: str, use: str) -> float:
        raw = hashlib.blake2b(f"{self._salt} {use} {conversation}".encode(), digest_size=8).digest()
        return int.from_bytes(raw, "big") / 2**64

    # -- what became of requests ------------------------------------------------------------------------------------

    def observe(self, seen: Seen, now: float) -> Move | None:
        """An in-scope request has ended. Returns the move it led to, if any."""
        if self.progress.state == "rolled_back":
            return None
        if seen.arm == "canary":
            self.progress.exposed += 1
        else:
            self._first.add(seen.first_token_s)
            self._gap.add(seen.gap_s)
            if self.progress.slow is None:
                self._note_times(now)
        lost = seen.missing
        if lost is None and seen.quality is not None and not math.isfinite(seen.quality):
            lost = "its quality is not a number"
        if lost is not None:
            self._write("lost", {"why": lost}, now)
            seen = replace(seen, quality=None)
        known = self._open.get(seen.conversation)
        if known is not None and known.arm != seen.arm:
            self._close(seen.conversation, now)  # the traffic rose: it has changed its arm
            known = None
        if known is None:
            known = self._open[seen.conversation] = Conversation(seen.arm, now)
        known.add(seen, self.progress.slow or Slow(), now)
        if known.turns >= self.progress.judge.rollout.most_turns:
            self._close(seen.conversation, now)
        return self._look(now)

    def tick(self, now: float) -> Move | None:
        """Close idle conversations, take orders from the journal. Returns the move this led to, if any."""
        before = self.progress.state, self.progress.stage
        for event in self._journal.poll():
            self.progress.apply(event)
        if (self.progress.state, self.progress.stage) != before:
            self._moved(now)
            return Move(self.progress.state, self.progress.stage, self.progress.why)
        idle = now - self.progress.judge.rollout.idle_s
        # In order of their last turn, as far as it is known: closing is what evidence comes from.
        for name in [name for name, each in self._open.items() if each.last <= idle]:
            self._close(name, now)
            move = self._look(now)
            if move is not None:
                return move
        return None

    # -- inside -----------------------------------------------------------------------------------------------------

    def _close(self, name: str, now: float) -> None:
        closed = self._open.pop(name)
        if closed.quality is not None:
            part = self.progress.judge.slice_of(closed.longest)
            # Three digits keep the distinct values few, and with them what limits cost to compute.
            self._write("pair", {"quality": round(closed.quality, 3), "slice": part, "turns": closed.turns}, now)
        if self.progress.state not in ("canary", "full"):
            return
        (self._canary if closed.arm == "canary" else self._exact).append(closed.guards)
        while self._canary and self._exact:
            policy, exact = self._canary.popleft(), self._exact.popleft()
            self._write("arms", {"differences": {name: policy[name] - exact[name] for name in GUARDS}}, now)

    def _look(self, now: float) -> Move | None:
        move = self.progress.decide()
        if move is not None:
            self._tell_exposed(now)
            self._write("move", {"state": move.state, "stage": move.stage, "why": move.why, "who": "controller"}, now)
            self._moved(now)
        return move

    def _moved(self, now: float) -> None:
        """A new stage: its conversations are compared among themselves, by times fixed before it began."""
        self._open.clear()
        self._exact.clear()
        self._canary.clear()
        self._note_times(now)

    def _note_times(self, now: float) -> None:
        times = {"first_token_s": self._first.p99, "gap_s": self._gap.p99}
        if all(map(math.isfinite, times.values())):
            self._write("times", times, now)

    def _tell_exposed(self, now: float) -> None:
        if self.progress.exposed != self._told:
            self._told = self.progress.exposed
            self._write("exposed", {"requests": self._told}, now)

    def _write(self, kind: str, data: Mapping[str, object], now: float) -> None:
        for event in self._journal.append(kind, data, now):
            self.progress.apply(event)
