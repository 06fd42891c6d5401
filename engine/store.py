"""The tensors behind page ids: keys, values and positions of one pool, and the copies the tables plan."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvgate.kernels import ops
from kvgate.kernels.types import Backend
from kvgate.lifecycle.tables import Appended, Moved, Tables


class PageStore:
    """K and V pools ``[pages, page_size, head_dim]`` in the model's dtype, positions int32 ``[pages, page_size]``.

    On the CPU ``positions`` is the tables' own array, so the host's bookkeeping and the kernels share one truth; on a
    GPU the kernels keep a copy beside the keys.
    """

    def __init__(
        self, tables: Tables, head_dim: int, dtype: torch.dtype, device: torch.device, backend: Backend | None = None
    ) -> None:
        shape = (tables.pool.total, tables.geometry.page_size, head_dim)
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)
        host = torch.from_numpy(tables.positions)
        self.positions = host if device.type == "cpu" else host.to(device)
        self.device = device
        self.backend: Backend | None = backend

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, K and V."""
        return 2 * self.k[0].numel() * self.k.element_size()

    @property
    def token_bytes(self) -> int:
        """Bytes of one slot, K and V."""
        return self.page_bytes // self.k.shape[1]

    def carry_out(self, plan: Appended | Moved | None) -> None:
        """Do the copies a plan needs before its tables may be read."""
        if plan is None or len(plan.copy_from) == 0:
            return
        copy = ops.copy_pages if isinstance(plan, Appended) else ops.copy_slots
        copy(self._ids(plan.copy_from), self._ids(plan.copy_to), self.k, self.v, self.positions, backend=self.backend)

    def append(self, k_THD: Tensor, v_THD: Tensor, position_T: Tensor, slots_TH: Tensor) -> None:
        """Write new keys and values of one layer."""
        ops.append_kv(k_THD, v_THD, position_T, slots_TH, self.k, self.v, self.positions, backend=self.backend)

    def gather(self, tensor: Tensor, pages: NDArray[np.int32]) -> Tensor:
        """``tensor`` (k or v) at ``pages`` ``[L, H, P]`` as ``[L, H, P * S, D]``; dead slots hold anything."""
        found = tensor[self._ids(pages.astype(np.int64))]
        return found.flatten(2, 3)

    def _ids(self, ids: NDArray[np.int32] | NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(ids).to(self.device)
