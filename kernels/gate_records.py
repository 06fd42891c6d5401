"""What the compile gate records about a compiled kernel, and its gates. Imports no triton."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHARED_BYTES = {80: 166912, 90: 232448}  # a block's opt-in maximum, CUDA C programming guide, table of capabilities
SOURCES = (
    "tiles.py",
    "triton_attend.py",
    "triton_launch.py",
    "triton_mass.py",
    "triton_move.py",
    "triton_ops.py",
    "triton_pages.py",
    "triton_parts.py",
)


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the compiler made of one configuration; sizes in bytes."""

    kernel: str
    arch: int
    case: dict[str, Any]
    constants: dict[str, Any]
    num_warps: int
    shared: int
    registers: int
    stack: int
    spills: int
    mma: str
    wide_loads: int

    @property
    def expected_loads(self) -> int:
        """16-byte load instructions of a thread if K, V and queries of one block are loaded that way."""
        c = self.constants
        if self.kernel == "move":
            slots = 2 * int(c["BLOCK"])
        elif self.kernel in ("attend", "column_mass"):
            queries = (2 if c["HAS_SINK"] else 1) * int(c["BLOCK_M"])
            slots = queries + (2 if self.kernel == "attend" else 1) * int(c["BLOCK_N"])
        else:
            return 0
        size = slots * int(c["BLOCK_D"]) * (4 if self.case["dtype"] == "fp32" else 2)
        return max(1, size // (16 * 32 * self.num_warps))

    def faults(self) -> list[str]:
        """Broken gates."""
        found = []
        if self.spills or self.stack:
            found.append(f"{self.spills} bytes of spills, {self.stack} bytes of stack")
        if self.shared > SHARED_BYTES[self.arch]:
            found.append(f"{self.shared} bytes of shared memory, the chip has {SHARED_BYTES[self.arch]}")
        if self.kernel in ("attend", "column_mass") and self.case["dtype"] != "fp32" and not self.mma:
            found.append("no tensor core instructions")
        if self.wide_loads < self.expected_loads and (self.kernel == "move" or self.case["dtype"] != "fp32"):
            found.append(f"{self.wide_loads} loads of 16 bytes, K, V and queries need {self.expected_loads}")
        return found


def source_hash() -> str:
    """Of the files that decide what is compiled."""
    folder = Path(__file__).parent
    return hashlib.sha256(b"".join((folder / name).read_bytes() for name in SOURCES)).hexdigest()[:16]
