"""What people ask of a rollout from outside of its server: where it stands, and orders. Orders go into its journal."""

from __future__ import annotations

import getpass
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvgate.serving.canary.journal import FILE, Event, Journal
from kvgate.serving.canary.progress import Judge, Move, Progress
from kvgate.typed import parse


class Refused(Exception):
    """An order that cannot be carried out; the message says why."""


class Desk:
    """A rollout as its journal in ``folder`` tells it. ValueError where there is none."""

    def __init__(self, folder: Path) -> None:
        if not (folder / FILE).is_file():
            raise ValueError(f"state folder {folder}: no {FILE}; give the folder that `kvgate serve --canary` writes")
        self._journal = Journal(folder)
        events = self._journal.poll()
        begins = [event for event in events if event.kind == "begin"]
        if not begins:
            raise ValueError(f"state folder {folder}: its journal never began a rollout")
        self.policy: str = begins[-1].data["policy"]
        self.progress = Progress(parse(Judge, begins[-1].data["judge"], f"{folder / FILE}: judge"))
        for event in events:
            self.progress.apply(event)

    def status(self) -> dict[str, Any]:
        """Where it stands, as plain data."""
        progress = self.progress
        lower, upper = progress.streams["quality"].bounds(progress.judge.alpha)
        return {
            "policy": self.policy,
            "state": progress.state,
            "traffic": progress.traffic,
            "since": progress.since,
            "why": progress.why,
            "next": None if progress.state in ("full", "rolled_back") else progress.waiting() or "a step may be taken",
            "paused": progress.paused(),
            "exposed_requests": progress.exposed,
            "quality": {"mean": progress.streams["quality"].mean, "lower": lower, "upper": upper},
            "measures": {
                name: {
                    "conversations": stream.count,
                    "mean_difference": stream.mean,
                    "margin": stream.margin,
                    "log_e_pass": stream.log_pass,
                    "log_e_block": stream.log_block,
                }
                for name, stream in progress.streams.items()
            },
        }

    def history(self) -> Iterator[Event]:
        """Everything that was decided, oldest first."""
        yield from self.progress.history

    def promote(self, why: str) -> Move:
        """One state further, whatever the evidence says, on the order of a person; Refused where there is none."""
        progress = self.progress
        if progress.state == "rolled_back":
            raise Refused(f"{self.policy} was rolled back ({progress.why}); it needs a new verdict")
        if progress.state == "full":
            raise Refused(f"{self.policy} has all of its traffic already")
        if progress.judge.shadow_only:
            raise Refused(f"{self.policy}: its verdict allows shadows only; judge it by a stricter gate")
        lacking = progress.waiting()
        move = progress.next_step(f"by order: {why}" + (f" (the controller waited: {lacking})" if lacking else ""))
        return self._order(move)

    def roll_back(self, why: str) -> Move:
        """Take the policy out of traffic until a new verdict."""
        if self.progress.state == "rolled_back":
            raise Refused(f"{self.policy} was rolled back already ({self.progress.why})")
        return self._order(Move("rolled_back", self.progress.stage, f"by order: {why}"))

    def _order(self, move: Move) -> Move:
        data = {"state": move.state, "stage": move.stage, "why": move.why, "who": getpass.getuser()}
        for event in self._journal.append("move", data, time.time()):
            self.progress.apply(event)
        return move
