"""Random paged attention problems with hostile memory: for tests, the check and benchmarks.

Whatever a kernel may not read is poisoned: dead slots and free pages hold NaN, table entries beyond the page count and
of dead pages hold ids far outside the pool, live words beyond the count are random.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from kvgate.kernels import ops, reference
from kvgate.kernels.types import Attention, Backend, PagedKV, Rules

FAR = 1_000_000_007  # a page id that no pool has


@dataclass(frozen=True, slots=True)
class Shape:
    """rows: (slots held, new tokens) of each row; keep: share of slots that live, new tokens always do."""

    rows: tuple[tuple[int, int], ...]
    kv_heads: int = 2
    group: int = 3
    head_dim: int = 64
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    keep: float = 0.7
    lower: bool = False
    spans: int = 0
    sinks: bool = False
    native_window: int | None = None
    softcap: float | None = None
    key_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Problem:
    """Arguments of one call; decode problems have one new token in every row."""

    q_TQD: Tensor
    cache: PagedKV
    query_position_T: Tensor
    row_start: list[int]
    rules: Rules

    def decode(self, backend: Backend, want_mass: bool = True) -> Attention:
        """`decode_attention` of this problem."""
        return ops.decode_attention(*self._arguments(), **self._options("R"), want_mass=want_mass, backend=backend)

    def extend(self, backend: Backend, want_mass: bool = True) -> Attention:
        """`extend_attention` of this problem."""
        starts = torch.tensor(self.row_start, dtype=torch.int32)
        arguments = (*self._arguments(), starts)
        return ops.extend_attention(*arguments, **self._options("T"), want_mass=want_mass, backend=backend)

    def exact(self) -> Attention:
        """The float64 reference."""
        return reference.extend(self.q_TQD, self.cache, self.query_position_T, self.row_start, self.rules, True)

    def rows(self, chosen: list[int]) -> Problem:
        """The same problem for some rows only, in the order given, on the same pool."""
        tokens = [t for row in chosen for t in range(self.row_start[row], self.row_start[row + 1])]
        starts = [0]
        for row in chosen:
            starts.append(starts[-1] + self.row_start[row + 1] - self.row_start[row])
        cache, rules = self.cache, self.rules
        return Problem(
            self.q_TQD[tokens],
            replace(
                cache,
                tables_RHP=cache.tables_RHP[chosen],
                live_RHP=cache.live_RHP[chosen],
                page_counts_RH=cache.page_counts_RH[chosen],
            ),
            self.query_position_T[tokens],
            starts,
            replace(
                rules,
                lower=None if rules.lower is None else rules.lower[tokens],
                exempt_RE2=None if rules.exempt_RE2 is None else rules.exempt_RE2[chosen],
                sink_end_R=None if rules.sink_end_R is None else rules.sink_end_R[chosen],
                q_sink=None if rules.q_sink is None else rules.q_sink[tokens],
            ),
        )

    def to(self, device: torch.device) -> Problem:
        """The same problem on another device; pools keep being strided views."""
        both = torch.stack((self.cache.k_pool_NSD, self.cache.v_pool_NSD), 1).to(device)
        cache = replace(_moved(self.cache, device), k_pool_NSD=both[:, 0], v_pool_NSD=both[:, 1])
        q, p = self.q_TQD.to(device), self.query_position_T.to(device)
        return Problem(q, cache, p, self.row_start, _moved(self.rules, device))

    def _arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        c = self.cache
        tables = (c.tables_RHP, c.live_RHP, c.page_counts_RH, c.positions_NS)
        return (self.q_TQD, c.k_pool_NSD, c.v_pool_NSD, *tables, self.query_position_T)

    def _options(self, tokens: str) -> dict[str, Any]:
        r = self.rules
        return {
            "scale": r.scale,
            f"lower_{tokens}": r.lower,
            "exempt_RE2": r.exempt_RE2,
            "sink_end_R": r.sink_end_R,
            f"q_sink_{tokens}QD": r.q_sink,
            "native_window": r.native_window,
            "softcap": r.softcap,
        }


def _moved(record: Any, device: torch.device) -> Any:
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return replace(record, **{name: v.to(device) for name, v in values.items() if isinstance(v, Tensor)})


def make(shape: Shape, seed: int = 0) -> Problem:
    """A problem of this shape; the same seed gives the same problem."""
    random = torch.Generator().manual_seed(seed)
    cache = _cache(shape, random)
    starts = [0]
    for _, new in shape.rows:
        starts.append(starts[-1] + new)
    tokens, query_heads = starts[-1], shape.kv_heads * shape.group
    query_position = [held - new + i for held, new in shape.rows for i in range(new)]
    q = torch.randn((tokens, query_heads, shape.head_dim), generator=random).to(shape.dtype)
    rules = Rules(
        shape.head_dim**-0.5,
        lower=_lower(shape, random) if shape.lower else None,
        exempt_RE2=_spans(shape, random) if shape.spans else None,
        sink_end_R=torch.randint(0, 9, (len(shape.rows),), generator=random).int() if shape.sinks else None,
        q_sink=torch.randn(q.shape, generator=random).to(shape.dtype) if shape.sinks else None,
        native_window=shape.native_window,
        softcap=shape.softcap,
    )
    return Problem(q, cache, torch.tensor(query_position, dtype=torch.int32), starts, rules)


def _cache(shape: Shape, random: torch.Generator) -> PagedKV:
    size, heads, rows = shape.page_size, shape.kv_heads, len(shape.rows)
    used = [-(-held // size) for held, _ in shape.rows]
    width = max([1, *used]) + 1
    total = heads * sum(used) + 3
    order = torch.randperm(total, generator=random).tolist()
    both = torch.full((total, 2, size, shape.head_dim), float("nan"), dtype=shape.dtype)
    positions = torch.full((total, size), -5, dtype=torch.int32)
    tables = torch.full((rows, heads, width), FAR, dtype=torch.int32)
    live = torch.randint(-(2**31), 2**31, (rows, heads, width), generator=random).int()
    counts = torch.tensor(used, dtype=torch.int32).view(-1, 1).repeat(1, heads)
    for row, (held, new) in enumerate(shape.rows):
        for head in range(heads):
            alive = torch.rand(held, generator=random) < shape.keep
            alive[held - new :] = True
            at = torch.randperm(used[row] * size, generator=random)[:held]  # slot of each position
            for page in range(used[row]):
                inside = (at // size == page) & alive
                live[row, head, page] = _word(at[inside] % size)
                if not inside.any():
                    continue
                page_id = order.pop()
                tables[row, head, page] = page_id
                slots, which = at[inside] % size, inside.nonzero().view(-1)
                values = torch.randn((2, len(which), shape.head_dim), generator=random)
                both[page_id, :, slots] = (values * torch.tensor([shape.key_scale, 1.0]).view(2, 1, 1)).to(shape.dtype)
                positions[page_id, slots] = which.int()
    return PagedKV(both[:, 0], both[:, 1], positions, tables, live, counts)


def _word(slots: Tensor) -> int:
    word = sum(1 << int(slot) for slot in slots)
    return word - (1 << 32) if word >> 31 else word


def _lower(shape: Shape, random: torch.Generator) -> Tensor:
    bounds = [torch.randint(0, max(1, held), (new,), generator=random) for held, new in shape.rows]
    return torch.cat(bounds).int()


def _spans(shape: Shape, random: torch.Generator) -> Tensor:
    edges = [torch.randint(0, max(1, held), (shape.spans, 2), generator=random) for held, _ in shape.rows]
    return torch.stack(edges).int()  # some start after they end: empty
