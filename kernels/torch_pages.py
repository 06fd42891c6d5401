"""Moving slots and pages in plain torch. Everything is read before anything is written."""

from __future__ import annotations

import torch
from torch import Tensor

from kvgate.kernels.types import Pools


def append(k_THD: Tensor, v_THD: Tensor, position_T: Tensor, slots_TH: Tensor, pools: Pools) -> None:
    """Write each new token's K, V and position at its flat slots, one per kv head."""
    k_pool, v_pool, positions = pools
    where = _split(slots_TH.reshape(-1), positions.shape[1])
    k_pool[where] = k_THD.reshape(-1, k_THD.shape[-1])
    v_pool[where] = v_THD.reshape(-1, v_THD.shape[-1])
    positions[where] = position_T[:, None].expand(slots_TH.shape).reshape(-1)


def copy_slots(src_M: Tensor, dst_M: Tensor, pools: Pools) -> None:
    """Copy K, V and position from slot to slot."""
    size = pools[2].shape[1]
    src, dst = _split(src_M, size), _split(dst_M, size)
    for pool in pools:
        pool[dst] = pool[src]


def copy_pages(src: Tensor, dst: Tensor, pools: Pools) -> None:
    """Copy whole pages."""
    for pool in pools:
        pool.index_copy_(0, dst.long(), pool.index_select(0, src))


def gather(ids: Tensor, pools: Pools) -> Pools:
    """Whole pages as new contiguous tensors on the pool's device."""
    k, v, positions = (pool.index_select(0, ids) for pool in pools)
    return k, v, positions


def scatter(ids: Tensor, pages: Pools, pools: Pools) -> None:
    """Write whole pages back."""
    for pool, page in zip(pools, pages, strict=True):
        pool.index_copy_(0, ids.long(), page.to(pool.device, pool.dtype))


def _split(slots: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Page and slot of flat slots: the pool may be a strided view, so it has no flat form to index."""
    return torch.div(slots, page_size, rounding_mode="floor"), slots % page_size
