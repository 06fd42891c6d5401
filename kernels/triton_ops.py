"""Launches the Triton attention kernels. Same signatures as `kvgate.kernels.torch_ops`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from kvgate.kernels.tiles import Kind, Tile, kind_of, mass_tile, power_of_two
from kvgate.kernels.triton_attend import attend_kernel, merge_kernel
from kvgate.kernels.triton_launch import Launch, interpreted
from kvgate.kernels.triton_mass import column_mass_kernel, score_mass_kernel
from kvgate.kernels.types import Attention, PagedKV, Rules

MASS_BLOCK = 512


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Work of one launch: tile i owns tokens from first_I[i] of row row_I[i], or (both None) row i's only token."""

    count: int
    row_I: Tensor | None
    first_I: Tensor | None


@dataclass(frozen=True, slots=True)
class _Results:
    """out [T, Q, D] and fp32 [T, Q]: lse, and the base-2 maximum and the sum of the softmax for the mass kernels."""

    out: Tensor
    lse: Tensor
    highest: Tensor
    total: Tensor


def _results(q: Tensor) -> _Results:
    """Filled with the answer for queries that see nothing, since no program may come by their row."""
    facts = torch.zeros((2, *q.shape[:2]), dtype=torch.float32, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float32, device=q.device)
    dtype = torch.float32 if interpreted() else q.dtype  # the interpreter truncates to bf16 instead of rounding
    return _Results(torch.zeros(q.shape, dtype=dtype, device=q.device), lse, facts[0], facts[1])


def decode(q_RQD: Tensor, cache: PagedKV, query_position_R: Tensor, rules: Rules, want_mass: bool) -> Attention:
    """One query a row; mass from stored logits."""
    rows, kv_heads, width = cache.tables_RHP.shape
    results = _results(q_RQD)
    mass = _no_mass(cache) if want_mass else None
    if rows == 0 or kv_heads == 0 or width == 0:
        return Attention(results.out.to(q_RQD.dtype), results.lse, mass)
    starts = cache.page_counts_RH  # not read: the tiles are the rows
    launch = _launch(q_RQD, cache, query_position_R, starts, rules)
    slots = width * cache.page_size
    scores = torch.empty((rows, q_RQD.shape[1], slots), dtype=torch.float32, device=q_RQD.device) if want_mass else None
    _attend(launch, _Tiles(rows, None, None), "decode", results, scores)
    if mass is not None and scores is not None:
        grid = (rows, kv_heads, triton.cdiv(slots, MASS_BLOCK))
        score_mass_kernel[grid](
            scores,
            results.highest,
            results.total,
            cache.page_counts_RH,
            mass,
            *cache.page_counts_RH.stride(),
            slots,
            G=launch.group,
            S=cache.page_size,
            BLOCK_G=power_of_two(launch.group),
            BLOCK_N=MASS_BLOCK,
        )
    return Attention(results.out.to(q_RQD.dtype), results.lse, mass)


def extend(
    q_TQD: Tensor, cache: PagedKV, query_position_T: Tensor, row_start: list[int], rules: Rules, want_mass: bool
) -> Attention:
    """Several queries a row: at most one launch for each kind of row; mass by computing the logits once more."""
    rows, kv_heads, width = cache.tables_RHP.shape
    results = _results(q_TQD)
    mass = _no_mass(cache) if want_mass else None
    if q_TQD.shape[0] == 0 or kv_heads == 0 or width == 0:
        return Attention(results.out.to(q_TQD.dtype), results.lse, mass)
    starts = torch.tensor(row_start, dtype=torch.int32).to(q_TQD.device)
    launch = _launch(q_TQD, cache, query_position_T, starts, rules)
    kinds: dict[Kind, list[int]] = {}
    for row in range(rows):
        tokens = row_start[row + 1] - row_start[row]
        if tokens:
            kinds.setdefault(kind_of(tokens, launch.group), []).append(row)
    for kind, members in kinds.items():
        tile = launch.tile(kind)
        _attend(launch, _tiles(row_start, members, tile.block_m // launch.group, q_TQD.device), kind, results, None)
    if mass is not None:
        _column_mass(launch, results, mass.view(rows, kv_heads, -1))
    return Attention(results.out.to(q_TQD.dtype), results.lse, mass)


def prefill(q_TQD: Tensor, k_THD: Tensor, v_THD: Tensor, rules: Rules, want_mass: bool) -> Attention:
    """One sequence over its own contiguous K and V: the same kernel without tables."""
    tokens, kv_heads, _ = k_THD.shape
    results = _results(q_TQD)
    mass = torch.zeros((1, kv_heads, tokens), dtype=torch.float32, device=q_TQD.device) if want_mass else None
    if tokens and kv_heads:
        starts = torch.tensor([0, tokens], dtype=torch.int32).to(q_TQD.device)
        k_THD, v_THD = (x if x.stride(2) == 1 else x.contiguous() for x in (k_THD, v_THD))
        launch = Launch(q_TQD, k_THD, v_THD, None, starts, starts, rules, kv_heads, 1)
        tile = launch.tile("long")
        _attend(launch, _tiles([0, tokens], [0], tile.block_m // launch.group, q_TQD.device), "long", results, None)
        if mass is not None:
            _column_mass(launch, results, mass)
    return Attention(results.out.to(q_TQD.dtype), results.lse, None if mass is None else mass[0])


def _no_mass(cache: PagedKV) -> Tensor:
    shape = (*cache.tables_RHP.shape, cache.page_size)
    return torch.zeros(shape, dtype=torch.float32, device=cache.tables_RHP.device)


def _launch(q: Tensor, cache: PagedKV, query_position: Tensor, row_start: Tensor, rules: Rules) -> Launch:
    rows, kv_heads, _ = cache.tables_RHP.shape
    cache = replace(cache, tables_RHP=_inner(cache.tables_RHP), live_RHP=_inner(cache.live_RHP))
    return Launch(q, cache.k_pool_NSD, cache.v_pool_NSD, cache, query_position, row_start, rules, kv_heads, rows)


def _inner(value: Tensor) -> Tensor:
    return value if value.stride(-1) == 1 else value.contiguous()


def _tiles(row_start: list[int], members: list[int], tokens: int, device: torch.device) -> _Tiles:
    """Tiles of `tokens` tokens, each row from its own first token."""
    pairs = [(row, first) for row in members for first in range(row_start[row], row_start[row + 1], tokens)]
    both = torch.tensor(pairs, dtype=torch.int32).t().contiguous().to(device)
    return _Tiles(len(pairs), both[0], both[1])


def _attend(launch: Launch, tiles: _Tiles, kind: Kind, results: _Results, scores: Tensor | None) -> None:
    group, dim = launch.group, int(launch.q.shape[2])
    tile = launch.tile(kind)
    splits, used = 1, (tile.block_m // group) * group
    target, highest, total = results.out, results.highest, results.total
    if tile.split and launch.cache is not None:
        splits = triton.cdiv(launch.cache.tables_RHP.shape[2] * launch.cache.page_size, tile.split)
        shape = (tiles.count, launch.kv_heads, splits, used)
        target = torch.empty((*shape, dim), dtype=torch.float32, device=launch.q.device)
        highest, total = torch.empty((2, *shape), dtype=torch.float32, device=launch.q.device)
    _start_attend(launch, tiles, tile, (target, highest, total), results.lse, scores, splits)
    if tile.split and launch.cache is not None:
        counts = launch.cache.page_counts_RH
        listed = tiles.row_I is not None
        merge_kernel[(tiles.count, launch.kv_heads, used)](
            target,
            highest,
            total,
            counts,
            launch.row_start,
            tiles.row_I if listed else counts,
            tiles.first_I if listed else counts,
            results.out,
            results.lse,
            results.highest,
            results.total,
            *counts.stride(),
            splits,
            G=group,
            D=dim,
            S=launch.cache.page_size,
            USED=used,
            BLOCK_D=tile.block_d,
            SPLIT=tile.split,
            TILED=listed,
            num_warps=4,
        )


def _start_attend(
    launch: Launch,
    tiles: _Tiles,
    tile: Tile,
    targets: tuple[Tensor, Tensor, Tensor],
    lse: Tensor,
    scores: Tensor | None,
    splits: int,
) -> None:
    attend_kernel[(tiles.count, launch.kv_heads, splits)](
        **launch.pointers(),
        **launch.numbers(),
        **launch.constants(),
        v_ptr=launch.v,
        tile_row_ptr=launch.row_start if tiles.row_I is None else tiles.row_I,
        tile_first_ptr=launch.row_start if tiles.first_I is None else tiles.first_I,
        out_ptr=targets[0],
        max_ptr=targets[1],
        sum_ptr=targets[2],
        lse_ptr=lse,
        scores_ptr=lse if scores is None else scores,
        scores_width=0 if scores is None else scores.shape[2],
        v_page=launch.v.stride(0),
        V_SLOT=launch.v.stride(1),
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=tile.block_d,
        SPLIT=tile.split,
        TILED=tiles.row_I is not None,
        STORE_SCORES=scores is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        maxnreg=tile.registers,
    )


def _column_mass(launch: Launch, results: _Results, mass_RHn: Tensor) -> None:
    tile = mass_tile(int(launch.q.shape[2]), launch.group, launch.q.element_size())
    width = int(mass_RHn.shape[2])
    column_mass_kernel[(triton.cdiv(width, tile.block_n), launch.kv_heads, launch.rows)](
        **launch.pointers(),
        **launch.numbers(),
        **launch.constants(),
        max_ptr=results.highest,
        sum_ptr=results.total,
        mass_ptr=mass_RHn,
        width=width,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_D=tile.block_d,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        maxnreg=tile.registers,
    )
