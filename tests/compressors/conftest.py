"""Evidence to judge policies by, made from slots in any order, some of them dead."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from kvgate.compressors.evidence import Evidence, Span


@pytest.fixture(scope="session")
def evidence() -> Callable[..., Evidence]:
    """Builds Evidence for 1 layer and as many heads as ``tokens`` has lists; slots are shuffled and padded with dead
    ones, which hold stale positions and a mass that would win if anyone looked at it.
    """

    def build(
        tokens: Sequence[Sequence[int]],
        length: int,
        *,
        mass: Sequence[Sequence[float]] | None = None,
        protected: tuple[Span, ...] = (),
        seed: int = 0,
    ) -> Evidence:
        width = max(len(head) for head in tokens) + 5
        shuffle = torch.Generator().manual_seed(seed)
        positions = torch.zeros(1, len(tokens), width, dtype=torch.int32)
        live = torch.zeros(1, len(tokens), width, dtype=torch.bool)
        scores = torch.full((1, len(tokens), width), float("inf"))
        for head, held in enumerate(tokens):
            order = torch.randperm(width, generator=shuffle)
            positions[0, head] = torch.randint(0, length, (width,), generator=shuffle, dtype=torch.int32)
            positions[0, head, order[: len(held)]] = torch.tensor(held, dtype=torch.int32)
            live[0, head, order[: len(held)]] = True
            if mass is not None:
                scores[0, head, order[: len(held)]] = torch.tensor(mass[head], dtype=torch.float32)
        return Evidence(positions, live, length, protected, mass=scores if mass is not None else None)

    return build


@pytest.fixture(scope="session")
def kept() -> Callable[[Evidence, Tensor], list[set[int]]]:
    """Token positions that ``slots`` leaves live, one set a head of the only layer."""

    def read(evidence: Evidence, slots: Tensor) -> list[set[int]]:
        return [set(where[keep].tolist()) for where, keep in zip(evidence.positions[0], slots[0], strict=True)]

    return read
