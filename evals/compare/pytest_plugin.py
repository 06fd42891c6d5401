"""A pytest fixture that fails a test on a proved loss. Installed with kvgate; imports nothing else until it is used.

def test_the_new_cache(kvgate_compare):
    kvgate_compare(pairs)                        # fails where a loss beyond the gate's margins is proved
    kvgate_compare(pairs, require="enable")      # fails unless the candidate is shown to lose less
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

if TYPE_CHECKING:
    from kvgate.evals.compare.judge import Judgement

Require = Literal["no_loss", "enable"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--kvgate-gate``: the gate of every comparison that names none."""
    parser.addoption("--kvgate-gate", default="production", help="gate of kvgate_compare (production)")


@pytest.fixture
def kvgate_compare(pytestconfig: pytest.Config) -> Callable[..., Judgement]:
    """Judges pairs, or the paths of logs, and fails the test where the candidate does not meet ``require``."""

    def compare(
        pairs: Iterable[Any] | str | Path,
        *logs: str | Path,
        gate: Any = None,
        require: Require = "no_loss",
        metric: str | None = None,
        candidate: str = "candidate",
    ) -> Judgement:
        from kvgate.evals.compare.judge import judge
        from kvgate.evals.compare.logs import read_logs

        if require not in ("no_loss", "enable"):
            raise ValueError(f"require is {require!r}; give 'no_loss' or 'enable'")
        given: Any = read_logs([Path(pairs), *map(Path, logs)], metric) if isinstance(pairs, str | Path) else pairs
        found = judge(given, gate or pytestconfig.getoption("--kvgate-gate"), candidate=candidate)
        if found.blocked or (require == "enable" and not found.enabled):
            pytest.fail(str(found), pytrace=False)
        return found

    return compare
