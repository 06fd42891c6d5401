"""kvgate from Python: judge pairs of scores, run a plan, read its verdicts.

``python examples/judge_and_run.py MODEL OUT`` runs four items on a local model, or on ``embedded``.
"""

import sys
from pathlib import Path

import kvgate

PAIRS = [("qa", item, None, 1.0, 1.0) for item in range(300)]


def judged() -> kvgate.Judgement:
    """Scores that another tool measured; no model, no torch."""
    return kvgate.judge(PAIRS, "production", candidate="mine")


def measured(model: str, out: Path) -> dict[str, str]:
    """Status of every row of a small run."""
    plan = {
        "name": "example",
        "model": model,
        "suites": [{"name": "retrieval", "counts": {512: 4}, "tasks": ["single"]}],
        "policies": [{"policy": "h2o", "budgets": [0.5]}],
    }
    board = kvgate.run(plan, out)
    return {row["label"]: row["status"] for row in board["rows"]}


if __name__ == "__main__":
    print(judged())
    print(sorted(kvgate.policies()), sorted(kvgate.suites()))
    print(measured(sys.argv[1], Path(sys.argv[2])))
