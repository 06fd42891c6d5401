"""What a policy is.

A policy is a frozen dataclass in its own file: parameters in, a pure ``decide`` out. Whatever a policy must remember
belongs to the sequence (``Keep.state``), never to the policy object, which one run shares among all its sequences.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray

from kvgate.compressors.evidence import Evidence, Keep, Need, Span

Shape = Literal["head", "layer", "model"]
"""Whom a budget belongs to: each kv head, the heads of a layer together, or the whole model."""
When = Literal["step", "once"]
"""When a policy evicts: after every step that leaves more than the budget, or once, after the prompt."""


@dataclass(frozen=True)
class Bounds:
    """Attention bounds that hold while several tokens are fed at once, before the policy is asked again.

    A query attends live slots inside the ``exempt`` spans and the ``window`` newest others up to its own position.
    With ``rebased_sinks`` set, slots at positions below it are attended as if the evicted tokens between them and the
    window did not exist.
    """

    window: int
    exempt: tuple[Span, ...]
    rebased_sinks: int = 0

    def lower(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """First position outside the exempt spans that each query attends: the ``window`` newest such tokens up to it.

        ``positions`` int64 ``[T]``, ascending; same shape back.
        """
        plain = np.maximum(positions - self.window + 1, 0)
        if all(span.end <= plain[0] for span in self.exempt):
            return plain
        others = self._others(int(positions[-1]))
        if len(others) == 0:
            return plain
        up_to = np.searchsorted(others, positions, side="right")
        return others[np.maximum(up_to - self.window, 0)]

    def hide(self, positions: NDArray[np.int64], native_window: int | None) -> bool:
        """Whether a query at one of ``positions`` is kept from a token that its layer, which declares
        ``native_window`` (None: full attention), would show it.
        """
        reach = positions * 0 if native_window is None else np.maximum(positions - native_window + 1, 0)
        others = self._others(int(positions[-1]))
        hidden = np.searchsorted(others, self.lower(positions)) - np.searchsorted(others, reach)
        return bool((hidden > 0).any())

    def _others(self, last: int) -> NDArray[np.int64]:
        """Positions up to ``last`` outside the exempt spans."""
        exempt = np.zeros(last + 1, np.bool_)
        for span in self.exempt:
            exempt[span.start : span.end] = True
        return np.flatnonzero(~exempt)


@dataclass(frozen=True)
class Policy(ABC):
    """Base class of retention policies.

    Class attributes:
        name: catalog name.
        needs: evidence that must be collected for it. A property where it follows from parameters.
    """

    name: ClassVar[str]
    needs: ClassVar[frozenset[Need]] = frozenset()

    @classmethod
    @abstractmethod
    def for_budget(cls, budget: int, *args: Any, **params: Any) -> Self:
        """The policy that keeps at most ``budget`` tokens per (layer, kv head), on average over the heads that share a
        budget. ValueError names a bad parameter.

        Subclasses name their parameters, with defaults and their source; those are what YAML may set. One that takes
        ``**params`` takes every field of the dataclass that has a default.
        """

    @classmethod
    def smallest_budget(cls, *args: Any, **params: Any) -> int:
        """The least budget this policy can honour with these parameters; a ratio that gives less is raised to it."""
        return 1

    @property
    @abstractmethod
    def budget(self) -> int:
        """Most live tokens per (layer, kv head) after any step; on average where heads share a budget. A policy that
        decides ``once`` keeps the answer's tokens beside it.
        """

    @property
    def budget_shape(self) -> Shape:
        """Whom the budget belongs to."""
        return "head"

    @property
    def decides(self) -> When:
        """When it evicts."""
        return "step"

    @abstractmethod
    def decide(self, evidence: Evidence) -> Keep:
        """Which slots stay live. Pure, but for probes. At most ``budget`` slots per (layer, kv head)."""

    def probe_tokens(self, prompt: int) -> int:
        """Most extra tokens that one probe runs over a cache of ``prompt`` tokens; they need positions and pages."""
        return 0

    def bounds(self, protected: tuple[Span, ...]) -> Bounds | None:
        """Attention bounds for tokens fed together; None: everything live is attended until the next decision."""
        return None

    def check(self, protected: tuple[Span, ...]) -> None:
        """Raise BudgetTooSmall if the protected spans leave no room for the newest token."""
        forced = covered(self.forced_spans(protected))
        if forced + 1 > self.budget:
            raise BudgetTooSmall(self.name, self.budget, forced)

    def forced_spans(self, protected: tuple[Span, ...]) -> tuple[Span, ...]:
        """Token ranges that stay whatever the scores: the protected ones, and a policy's own sinks."""
        return protected

    def describe(self) -> dict[str, Any]:
        """Parameters for records and tables; whose budget it is and when it decides where that is not the default."""
        found = asdict(self)
        if self.budget_shape != "head":
            found["shape"] = self.budget_shape
        if self.decides != "step":
            found["when"] = self.decides
        return found


class BudgetTooSmall(ValueError):
    """The tokens that must stay already fill the budget."""

    def __init__(self, name: str, budget: int, forced: int) -> None:
        super().__init__(
            f"policy {name}: budget {budget} is too small for {forced} protected and sink tokens "
            f"plus the newest one; use at least {forced + 1}"
        )


def covered(spans: tuple[Span, ...]) -> int:
    """Tokens in the union of ``spans``."""
    total = end = 0
    for span in sorted(spans, key=lambda span: span.start):
        total += max(0, span.end - max(span.start, end))
        end = max(end, span.end)
    return total
