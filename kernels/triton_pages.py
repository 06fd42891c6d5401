"""Launches the Triton mover. Same signatures as `kvgate.kernels.torch_pages`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kvgate.kernels.tiles import power_of_two
from kvgate.kernels.triton_move import move_kernel
from kvgate.kernels.types import Pools


@dataclass(frozen=True, slots=True)
class _Side:
    """One side of a move: K, V [outer, inner, D], positions [outer, inner]; ids of moved units, None for all."""

    k: Tensor
    v: Tensor
    positions: Tensor
    ids: Tensor | None


def move_block(head_dim: int) -> int:
    """Slots a program moves."""
    return max(16, 4096 // power_of_two(head_dim))


def append(k_THD: Tensor, v_THD: Tensor, position_T: Tensor, slots_TH: Tensor, pools: Pools) -> None:
    """New tokens of all rows in one launch; the source is [tokens, heads], one position for all heads of a token."""
    positions = position_T[:, None].expand(slots_TH.shape)
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k_THD, v_THD))
    _move(_Side(k, v, positions, None), _Side(*pools, slots_TH.contiguous()), slots_TH.numel(), 1)


def copy_slots(src_M: Tensor, dst_M: Tensor, pools: Pools) -> None:
    """Slot to slot, out of place."""
    _move(_Side(*pools, src_M.contiguous()), _Side(*pools, dst_M.contiguous()), src_M.numel(), 1)


def copy_pages(src: Tensor, dst: Tensor, pools: Pools) -> None:
    """Page to page, out of place."""
    size = pools[2].shape[1]
    _move(_Side(*pools, src.contiguous()), _Side(*pools, dst.contiguous()), src.numel() * size, size)


def gather(ids: Tensor, pools: Pools) -> Pools:
    """Pages into contiguous buffers on the pools' device."""
    k_pool = pools[0]
    size, dim = k_pool.shape[1:]
    shape = (ids.numel(), size, dim)
    k, v = (torch.empty(shape, dtype=k_pool.dtype, device=k_pool.device) for _ in range(2))
    found = torch.empty(shape[:2], dtype=torch.int32, device=k_pool.device)
    _move(_Side(*pools, ids.contiguous()), _Side(k, v, found, None), ids.numel() * size, size)
    return k, v, found


def scatter(ids: Tensor, pages: Pools, pools: Pools) -> None:
    """Buffers (of any device) into pages."""
    k, v, positions = (page.to(pools[0].device, non_blocking=True).contiguous() for page in pages)
    size = pools[2].shape[1]
    _move(_Side(k, v, positions, None), _Side(*pools, ids.contiguous()), ids.numel() * size, size)


def _move(src: _Side, dst: _Side, count: int, unit: int) -> None:
    if count == 0:
        return
    dim = int(dst.k.shape[2])
    block = move_block(dim)
    move_kernel[(triton.cdiv(count, block),)](
        src.k,
        src.v,
        src.positions,
        src.positions if src.ids is None else src.ids,
        dst.k,
        dst.v,
        dst.positions,
        dst.positions if dst.ids is None else dst.ids,
        count,
        src.k.stride(0),
        src.v.stride(0),
        src.positions.stride(0),
        dst.k.stride(0),
        dst.v.stride(0),
        dst.positions.stride(0),
        D=dim,
        UNIT=unit,
        SRC_INDEXED=src.ids is not None,
        DST_INDEXED=dst.ids is not None,
        SRC_SIZE=src.k.shape[1],
        DST_SIZE=dst.k.shape[1],
        SRC_K_INNER=src.k.stride(1),
        SRC_V_INNER=src.v.stride(1),
        SRC_POSITIONS_INNER=src.positions.stride(1),
        DST_K_INNER=dst.k.stride(1),
        DST_V_INNER=dst.v.stride(1),
        BLOCK=block,
        BLOCK_D=power_of_two(dim),
        num_warps=4,
    )
