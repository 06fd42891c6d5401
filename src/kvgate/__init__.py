"""kvgate: measures KV-cache eviction policies against exact full-KV runs and decides which may be enabled.

``kvgate.judge(pairs, gate)`` judges scores that somebody else measured; it imports no torch. ``kvgate.run(plan, out)``
measures; ``policies()`` and ``suites()`` are what a plan can name.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvgate.api import policies, run, suites
    from kvgate.evals.compare.judge import Judgement, ScoredPair, judge

__all__ = ["Judgement", "ScoredPair", "__version__", "judge", "policies", "run", "suites"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """What is public, imported when it is asked for: the command line need not wait for it."""
    if name in {"Judgement", "ScoredPair", "judge"}:
        from kvgate.evals.compare import judge as module

        return getattr(module, name)
    if name in {"policies", "run", "suites"}:
        from kvgate import api

        return getattr(api, name)
    raise AttributeError(f"module 'kvgate' has no attribute {name!r}")
