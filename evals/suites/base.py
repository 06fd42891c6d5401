"""What a suite is, and the catalog.

To add one: write a class like those beside this file and name it, either as ``module:Class`` in a plan or under the
entry point group ``kvgate.suites``. Nothing else needs an edit.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kvgate.evals.data.corpus import fingerprint
from kvgate.evals.data.items import Item, Protocol
from kvgate.evals.data.tokens import Tokens

DEFAULT_COUNTS: Mapping[int, int] = {512: 5, 1024: 5, 2048: 1}
DEFAULT_DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
MOST_OPTION = 1 << 24  # of a number among a suite's options


@dataclass(frozen=True)
class BuildSpec:
    """What to build.

    Attributes:
        counts: nominal context length in tokens -> items per task at that length.
        depths: where the evidence may stand, 0 = start, 1 = end; dealt out in turn, each task starting elsewhere.
        seed: same seed, same tokenizer, same sources: same items.
        tasks: task names; empty means the suite's default ones.
        options: the suite's own options; an unknown one is an error.
    """

    counts: Mapping[int, int] = field(default_factory=lambda: dict(DEFAULT_COUNTS))
    depths: tuple[float, ...] = DEFAULT_DEPTHS
    seed: int = 0
    tasks: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for length, count in self.counts.items():
            if length < 64:
                raise ValueError(f"suite lengths: {length} is too short; use at least 64 tokens")
            if count < 0:
                raise ValueError(f"suite counts: {count} items at length {length}; use 0 or more")
        if not self.depths or any(not 0 <= depth <= 1 for depth in self.depths):
            raise ValueError(f"suite depths: {list(self.depths)}; use numbers from 0 to 1")


@dataclass(frozen=True)
class GroupSpec:
    """One group of items to make: they may share a context, and then share a cluster."""

    task: str
    length: int
    depth: float
    index: int
    room: int
    depths: tuple[float, ...]
    rng: random.Random
    options: Mapping[str, Any]


class Suite(ABC):
    """Builds items, and says what they measure. Most suites are :class:`Generated`.

    Class attributes:
        name: catalog name.
        measures, why_eviction_hurts: one paragraph each, shown by ``kvgate suites``.
        tasks: task name -> one line about it. ``optional`` ones are built only when asked for by name.
        floor: score under which the exact run is not competent and no verdict is given.
        protocol: the default protocol of its items.
        loose_depths: tasks whose evidence stands where the source has it; the nearest depth asked for names the slice.
        twins: task -> the task whose random numbers it uses, so that the two differ in one thing only.
        options: option name -> default.
    """

    name: ClassVar[str]
    measures: ClassVar[str]
    why_eviction_hurts: ClassVar[str]
    tasks: ClassVar[Mapping[str, str]]
    optional: ClassVar[frozenset[str]] = frozenset()
    floor: ClassVar[float] = 0.6
    protocol: ClassVar[Protocol] = "question_unseen"
    loose_depths: ClassVar[frozenset[str]] = frozenset()
    twins: ClassVar[Mapping[str, str]] = {}
    options: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def origin(cls) -> str:
        """Where its texts come from, and on what terms: one line for ``kvgate suites``."""
        return f"made locally from the documentation and standard library of {fingerprint()}"

    @classmethod
    def has_depth(cls, task: str) -> bool:
        """Whether the items of a task say at what depth their evidence stands."""
        return True

    @classmethod
    def has_source(cls, task: str) -> bool:
        """Whether a task's clusters are source documents, the same whatever the seed, rather than made contexts."""
        return True

    @abstractmethod
    def build(self, tokens: Tokens, spec: BuildSpec) -> list[Item]:
        """All items of ``spec``, by task, then length, then index. ValueError for what cannot be built."""

    def chosen(self, asked: tuple[str, ...]) -> list[str]:
        """Task names to build, in the suite's own order. ValueError for an unknown one."""
        _known("task", dict.fromkeys(asked), self.tasks, self.name)
        return [task for task in self.tasks if (task in asked if asked else task not in self.optional)]

    def settled(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The suite's options with the given ones. ValueError for an unknown one, or a value unlike the default."""
        _known("option", options, self.options, self.name)
        for name, value in options.items():
            default = self.options[name]
            if type(value) is not type(default) or (isinstance(value, int) and not 0 <= value <= MOST_OPTION):
                kind = "a text" if isinstance(default, str) else f"a whole number from 0 to {MOST_OPTION}"
                kind = "true or false" if isinstance(default, bool) else kind
                raise ValueError(f"suite {self.name}: option {name} is {value!r:.80}; give {kind}")
        return {**self.options, **options}


class Generated(Suite):
    """A suite whose items are made, one :class:`GroupSpec` at a time, to the exact length."""

    @classmethod
    def has_source(cls, task: str) -> bool:
        """Contexts are made, a new one for each cluster and seed."""
        return False

    @abstractmethod
    def make(self, tokens: Tokens, spec: GroupSpec) -> list[Item]:
        """One to ``spec.room`` items whose first index is ``spec.index``. ValueError if the length is too short."""

    def build(self, tokens: Tokens, spec: BuildSpec) -> list[Item]:
        """All items of ``spec``, by task, then length, then index. Raises ValueError for unknown tasks and options."""
        options = self.settled(spec.options)
        items: list[Item] = []
        for task in self.chosen(spec.tasks):
            for length, count in sorted(spec.counts.items()):
                items.extend(self._slice(tokens, spec, options, task, length, count))
        for item in items:
            tokens.check(item.context)
        return items

    def _slice(
        self, tokens: Tokens, spec: BuildSpec, options: Mapping[str, Any], task: str, length: int, count: int
    ) -> list[Item]:
        seeded = self.twins.get(task, task)
        rank = list(self.tasks).index(seeded)
        made: list[Item] = []
        groups = 0
        while len(made) < count:
            depth = spec.depths[(groups + rank) % len(spec.depths)]
            rng = random.Random(f"{spec.seed}/{self.name}/{seeded}/{length}/{groups}")
            wanted = GroupSpec(task, length, depth, len(made), count - len(made), spec.depths, rng, options)
            group = self.make(tokens, wanted)
            assert 0 < len(group) <= wanted.room, f"{self.name}/{task}: {len(group)} items for a room of {wanted.room}"
            made.extend(group)
            groups += 1
        return made


def _known(what: str, given: Mapping[str, Any], allowed: Iterable[str], suite: str) -> Mapping[str, Any]:
    for name in given:
        if name not in allowed:
            raise ValueError(f"suite {suite}: unknown {what} {name!r}; it has {', '.join(allowed) or 'none'}")
    return given
