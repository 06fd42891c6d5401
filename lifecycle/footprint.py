"""Blocks a sequence holds, native windows counted: what admission, growth and the forecast reckon with. Pure.

A block is ``page_size`` tokens over all layers and kv heads. A layer with a declared window of ``w`` tokens holds the
newest ``w - 1`` of the settled ones and what the running step adds; new tokens take the slots of dead ones first, so
its pages are at most those of that many tokens plus one, for the page that the window's edge cuts. Only settled tokens
move the edge: a token in flight, or a speculative one that may be rejected, frees nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
Singles = NDArray[np.float32]


@dataclass(frozen=True)
class Footprint:
    """How many blocks tokens take.

    Attributes:
        page_size: tokens of a block. windows: each layer's native window, None for a layer without one; empty where no
            layer has one.
    """

    page_size: int
    windows: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        for window in self.windows:
            if window is not None and window < 1:
                raise ValueError(f"window {window}: needs at least 1 token")

    @cached_property
    def windowed(self) -> bool:
        """Whether any layer has a window."""
        return bool(self._groups)

    @cached_property
    def _groups(self) -> tuple[tuple[int, int], ...]:
        """Each window and the layers that have it."""
        return tuple(sorted(Counter(w for w in self.windows if w is not None).items()))

    @cached_property
    def chunk(self) -> int | None:
        """Most tokens worth feeding a row at once: more would fill pages that the widest window drops again at once."""
        return max(self.page_size, self._groups[-1][0]) if self.windowed else None

    def whole(self, tokens: Any) -> Any:
        """Blocks without any window, elementwise."""
        return -(-tokens // self.page_size)

    def blocks(self, settled: Any, fresh: Any) -> Any:
        """Most blocks held while ``fresh`` tokens join ``settled`` ones, elementwise over integers or arrays."""
        whole = self.whole(settled + fresh)
        if not self.windowed:
            return whole
        pages = whole * (len(self.windows) - sum(count for _, count in self._groups))
        for window, count in self._groups:
            held = self.whole(np.minimum(settled, window - 1) + fresh) + 1
            pages = pages + count * np.minimum(whole, held)
        return -(-pages // len(self.windows))

    def reaching(self, tokens: int, most: int) -> int:
        """Most blocks held on the way to ``tokens`` tokens, fed at most ``most`` at once."""
        last = min(tokens, most, self.chunk or most)
        return int(self.blocks(tokens - last, last))

    def steady(self, tokens: Singles) -> Singles:
        """Blocks while decoding at ``tokens`` tokens, fp32 in and out, for the forecast."""
        whole: Singles = np.ceil(tokens * np.float32(1.0 / self.page_size))
        if not self.windowed:
            return whole
        pages = whole * np.float32(len(self.windows) - sum(count for _, count in self._groups))
        for window, count in self._groups:
            pages += np.float32(count) * np.minimum(whole, np.float32(self.whole(window) + 1))
        return np.asarray(np.ceil(pages / np.float32(len(self.windows))), np.float32)
