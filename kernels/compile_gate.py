"""Compiles every kernel configuration for GPUs that are not there, and gates what the compiler made of it.

    python -m kvgate.kernels.compile_gate [--out FILE] [--only TEXT] [--arch 80,90]

The real launchers run against a driver that compiles and launches nothing, so the configurations are those that the
dispatcher chooses, with Triton's own specialisation. Gates: no spills, shared memory within the chip; where K and V
have 16 bits, tensor core instructions and 16-byte loads; 16-byte loads in the mover for every dtype. Must run without
TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from kvgate.kernels import triton_attend, triton_mass, triton_move, triton_ops, triton_pages
from kvgate.kernels.gate_records import SHARED_BYTES, Compiled, source_hash
from kvgate.kernels.types import PagedKV, Rules

KERNELS = {
    "attend": triton_attend.attend_kernel,
    "merge": triton_attend.merge_kernel,
    "score_mass": triton_mass.score_mass_kernel,
    "column_mass": triton_mass.column_mass_kernel,
    "move": triton_move.move_kernel,
}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True, slots=True)
class Case:
    """One set of arguments for all operations; features, joined by "+": lower (and spans), sink, cap, mass."""

    head_dim: int
    dtype: str
    group: int
    page_size: int
    features: str


class _DryDriver:
    """Stands in for Triton's CUDA driver: answers for a chip, loads and launches nothing."""

    def __init__(self, arch: int) -> None:
        self._arch = arch
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (1, 1, 0, 0, 1024),
            unload_module=lambda _: None,
            get_device_properties=lambda _: {"max_shared_mem": SHARED_BYTES[arch]},
        )

    def get_current_device(self) -> int:
        return self._arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)

    def launcher_cls(self, source: object, metadata: object) -> Any:
        return lambda *_: None


def cases() -> Iterator[Case]:
    """All head dims and dtypes with and without every feature; page sizes, groups and features on the common ones."""
    groups = {40: 2, 64: 3, 80: 5, 96: 1, 128: 4, 256: 8}
    everything = "lower+sink+cap+mass"
    for dim, group in groups.items():
        for dtype in DTYPES:
            for features in ("", everything):
                yield Case(dim, dtype, group, 16, features)
    for dim in (64, 128):
        for size in (8, 32):
            yield Case(dim, "bf16", groups[dim], size, everything)
        for features in ("mass", "lower+mass", "lower+sink", "cap"):
            yield Case(dim, "bf16", groups[dim], 16, features)
    for group in (1, 2, 5, 7, 8):
        yield Case(128, "bf16", group, 16, everything)


def run_case(case: Case) -> None:
    """All operations once: decode, rows of every kind in one extend, prefill, and the moves."""
    dtype, heads, pages = DTYPES[case.dtype], 2, 4
    pool = torch.zeros((16, case.page_size, case.head_dim), dtype=dtype)
    positions = torch.zeros((16, case.page_size), dtype=torch.int32)
    starts = [0, 1]
    for tokens in {2, max(1, 16 // case.group), max(1, 64 // case.group), 200}:
        starts.append(starts[-1] + tokens)
    rows, tokens = len(starts) - 1, starts[-1]
    table = torch.zeros((rows, heads, pages), dtype=torch.int32)
    cache = PagedKV(pool, pool.clone(), positions, table, table.clone(), torch.zeros((rows, heads), dtype=torch.int32))

    mass = "mass" in case.features
    has = case.features.split("+")

    def rules(count: int) -> Rules:
        numbers = torch.zeros(count, dtype=torch.int32)
        spans = torch.zeros((rows, 2, 2), dtype=torch.int32) if "lower" in has else None
        ends, sinks = (numbers[:rows].clone(), queries(count)) if "sink" in has else (None, None)
        return Rules(0.1, numbers if "lower" in has else None, spans, ends, sinks, 64, 30.0 if "cap" in has else None)

    def queries(count: int) -> Tensor:
        return torch.zeros((count, heads * case.group, case.head_dim), dtype=dtype)

    triton_ops.decode(queries(rows), cache, torch.zeros(rows, dtype=torch.int32), rules(rows), mass)
    positions_T = torch.zeros(tokens, dtype=torch.int32)
    triton_ops.extend(queries(tokens), cache, positions_T, starts, rules(tokens), mass)
    new = torch.zeros((tokens, heads, case.head_dim), dtype=dtype)
    triton_ops.prefill(queries(tokens), new, new.clone(), Rules(0.1, softcap=30.0 if "cap" in has else None), mass)
    pools = (pool, cache.v_pool_NSD, positions)
    ids = torch.zeros(16, dtype=torch.int32)
    slots = torch.zeros((tokens, heads), dtype=torch.int64)
    triton_pages.append(new, new, torch.zeros(tokens, dtype=torch.int32), slots, pools)
    triton_pages.copy_slots(slots.view(-1), slots.view(-1), pools)
    triton_pages.copy_pages(ids, ids, pools)
    triton_pages.scatter(ids, triton_pages.gather(ids, pools), pools)


def compiled_kernels(arch: int) -> Iterator[tuple[str, Any, Any]]:
    """(kernel name, cache key, CompiledKernel) of everything compiled for `arch` in this process."""
    for name, kernel in KERNELS.items():
        for key, built in kernel.device_caches[arch][0].items():
            yield name, key, built


def resources(cubin: bytes) -> tuple[int, int, int]:
    """Registers, stack bytes and spilled local bytes, from cuobjdump."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack, local = (int(re.search(rf"{word}:(\d+)", text)[1]) for word in ("REG", "STACK", "LOCAL"))  # type: ignore[index]
    return registers, stack, local


def measure(name: str, case: Case, arch: int, built: Any) -> Compiled:
    """One record of a compiled kernel."""
    ptx = built.asm["ptx"]
    registers, stack, spills = resources(built.asm["cubin"])
    mma = next((word for word in ("wgmma.mma_async", "mma.sync") if word in ptx), "")
    wide = sum(_load_bits(line) == 128 for line in re.findall(r"(?:ld\.global|cp\.async\.c[ag])[^\n]*", ptx))
    arguments = built.src.fn.arg_names
    constants = {arguments[key[0]]: value for key, value in built.src.constants.items() if arguments[key[0]].isupper()}
    return Compiled(
        name,
        arch,
        asdict(case),
        constants,
        built.metadata.num_warps,
        built.metadata.shared,
        registers,
        stack,
        spills,
        mma,
        wide,
    )


def _load_bits(line: str) -> int:
    if line.startswith("cp.async"):
        size = re.search(r"0x([0-9a-f]+)", line)
        return 8 * int(size[1], 16) if size is not None else 0
    found = re.search(r"\.v(\d)\.[bfsu](\d+)", line) or re.search(r"()\.[bfsu](\d+)", line)
    return int(found[1] or 1) * int(found[2]) if found is not None else 0


def run(architectures: list[int], only: str) -> list[Compiled]:
    """Compile and measure all cases whose text contains `only`."""
    records: list[Compiled] = []
    for arch in architectures:
        triton.runtime.driver.set_active(_DryDriver(arch))
        seen: set[int] = set()
        for case in cases():
            if only not in str(case):
                continue
            began = time.perf_counter()
            run_case(case)
            fresh = [(name, built) for name, _, built in compiled_kernels(arch) if id(built) not in seen]
            seen |= {id(built) for _, built in fresh}
            new = [measure(name, case, arch, built) for name, built in fresh]
            records += new
            for record in new:
                for fault in record.faults():
                    print(f"FAULT {record.kernel} sm_{record.arch} {record.case} {record.constants}: {fault}")
            faulty = sum(bool(record.faults()) for record in new)
            print(
                f"sm_{arch} {case}: {len(new)} kernels, {faulty} faulty, {time.perf_counter() - began:.0f} s",
                flush=True,
            )
    return records


def main() -> int:
    """Command line; exit 1 where a gate is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write all records as JSON")
    parser.add_argument(
        "--only", default="", help="cases whose text contains this, for example \"head_dim=64, dtype='bf16'\""
    )
    parser.add_argument("--arch", default="80,90", help="compute capabilities, two digits each")
    arguments = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET is set: nothing would be compiled; unset it")
    records = run([int(arch) for arch in arguments.arch.split(",")], arguments.only)
    broken = [record for record in records if record.faults()]
    print(f"triton {triton.__version__}: {len(records)} configurations, {len(broken)} faults")
    if arguments.out:
        body = {"schema_version": 1, "triton": triton.__version__, "source_hash": source_hash()}
        lines = ",\n".join(json.dumps(asdict(record), sort_keys=True) for record in records)
        text = json.dumps(body)[:-1] + f', "records": [\n{lines}\n]}}\n'
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
