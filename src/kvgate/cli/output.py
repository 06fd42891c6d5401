"""What commands have in common: exit codes, and a leaderboard on standard output."""

from __future__ import annotations

import json
import math
from typing import Any

DONE, NOT_PASSED, BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 130, 141


def print_board(board: dict[str, Any], *, as_json: bool, reasons: bool) -> None:
    if as_json:
        print(json.dumps(board, indent=1, sort_keys=True, ensure_ascii=False))
        return
    from kvgate.evals.report.tables import print_leaderboard, stdout_console

    console = stdout_console()
    print_leaderboard(board, console, reasons=reasons)
    from kvgate.evals.leaderboard.fidelity import fidelity_lines

    for line in fidelity_lines(board):
        console.print(line, highlight=False)
    if "stopped" in board:
        from kvgate.evals.run.early_stopping import describe

        console.print(describe(board["stopped"]), highlight=False)


def enforced(board: dict[str, Any], enforce: bool) -> int:
    passed = bool(board["rows"]) and all(row["status"] == "enable" for row in board["rows"])
    return NOT_PASSED if enforce and not passed else DONE


def finite(value: Any) -> Any:
    """Plain data for JSON, which has no infinities: null in their place."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
