"""``kvgate canary status | history | promote | rollback STATE``: a running rollout, seen and steered from outside."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime
from typing import Any

from kvgate.cli.output import DONE, NOT_PASSED

ACTIONS = ("status", "history", "promote", "rollback")


def main(options: argparse.Namespace) -> int:
    """Carry one out; 1 where an order is refused. ValueError for a folder that is no rollout's."""
    from kvgate.serving.canary.orders import Desk, Refused

    desk = Desk(options.state)
    action = options.results.name
    if action == "status":
        _status(desk.status(), as_json=options.json)
        return DONE
    if action == "history":
        for event in desk.history():
            print(json.dumps({"at": _when(event.at), "kind": event.kind, **event.data}, ensure_ascii=False))
        return DONE
    if not options.why:
        raise ValueError(f"{action}: say why with --why TEXT; it goes into the audit")
    try:
        move = desk.promote(options.why) if action == "promote" else desk.roll_back(options.why)
    except Refused as refusal:
        print(f"kvgate: {refusal}", file=sys.stderr)
        return NOT_PASSED
    print(f"{desk.policy}: {desk.progress.place}, {move.why}")
    return DONE


def _status(found: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found, indent=1, ensure_ascii=False))
        return
    quality = found["quality"]
    print(f"{found['policy']}: {found['state'].replace('_', ' ')}, {100 * found['traffic']:g} % of traffic")
    print(f"  since {_when(found['since'])}: {found['why']}")
    if found["next"] is not None:
        print(f"  next: {found['next']}")
    print(f"  {found['exposed_requests']} requests were answered under it")
    print(f"  quality: {quality['mean']:+.4f} (limits {quality['lower']:+.4f} to {quality['upper']:+.4f})")
    for name, each in found["measures"].items():
        if each["conversations"]:
            print(
                f"  {name:22} {each['mean_difference']:+.4f} over {each['conversations']} conversations, "
                f"margin {each['margin']:g}"
            )


def _when(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
