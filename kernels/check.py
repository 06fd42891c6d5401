"""Proves the kernels on this machine and measures them; JSON out.

    python -m kvgate.kernels.check --device cuda [--out FILE]
    python -m kvgate.kernels.check --device cpu --small [--out FILE]

Correctness first: every case against the float64 reference, with poisoned memory. Speed only if all is right.
Needs torch, and triton for --device cuda; with TRITON_INTERPRET=1 the CPU run checks the Triton kernels too. Exit 0 all
right, 1 something is wrong, 2 the device is not there.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

from kvgate.kernels import ops, reference, speed
from kvgate.kernels.problems import Problem, Shape, make
from kvgate.kernels.types import Attention, Backend, Rules

OUT_LIMIT = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
FP32_LIMIT = 1e-4
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Finding:
    """Worst absolute errors of one case against float64; `right` if all are within their limits."""

    operation: str
    backend: str
    case: str
    dtype: str
    out: float
    lse: float
    mass: float
    right: bool


def shapes(small: bool) -> Iterator[Shape]:
    """Head dims, groups, page sizes and rules; rows of length 1, odd lengths, and beyond a split."""
    full = [(40, 1, 8), (64, 3, 16), (80, 7, 32), (96, 5, 16), (128, 4, 16), (128, 8, 32), (256, 2, 8)]
    for dim, group, size in full[:3] if small else full:
        for dtype in DTYPES:
            rows = ((1, 1), (2 * size + 1, 1), (95, 1)) if small else ((1, 1), (2 * size + 1, 1), (1100, 1))
            yield Shape(rows, 2, group, dim, size, dtype)
            yield Shape(rows, 2, group, dim, size, dtype, 0.5, True, 2, True, 70, 20.0)


def _errors(operation: str, backend: str, case: str, dtype: torch.dtype, got: Attention, want: Attention) -> Finding:
    def worst(a: Tensor, b: Tensor) -> float:
        same = (a.double().cpu() == b).all() or a.numel() == 0
        gap = (torch.nan_to_num(a.double().cpu(), neginf=-1e9) - torch.nan_to_num(b, neginf=-1e9)).abs()
        broken = bool(torch.isnan(a).any())
        return float("inf") if broken else 0.0 if bool(same) else float(gap.max())

    out, lse = worst(got.out, want.out), worst(got.lse, want.lse)
    mass = worst(got.mass, want.mass) if got.mass is not None and want.mass is not None else 0.0
    right = out <= OUT_LIMIT[dtype] and lse <= FP32_LIMIT and mass <= FP32_LIMIT
    return Finding(operation, backend, case, str(dtype).removeprefix("torch."), out, lse, mass, right)


def attention_findings(device: torch.device, backend: Backend, small: bool) -> Iterator[Finding]:
    """Decode, extend and prefill."""
    for number, shape in enumerate(shapes(small)):
        name = f"D{shape.head_dim} G{shape.group} S{shape.page_size} {'all rules' if shape.lower else 'plain'}"
        decode = make(shape, number)
        yield _errors("decode", backend, name, shape.dtype, decode.to(device).decode(backend), decode.exact())
        tokens = (1, 9, 40) if small else (1, 20, 150)
        chunk = make(_with_tokens(shape, tokens), number)
        yield _errors("extend", backend, name, shape.dtype, chunk.to(device).extend(backend), chunk.exact())
        yield _prefill_finding(decode, device, backend, name, 65 if small else 300)


def _with_tokens(shape: Shape, tokens: tuple[int, ...]) -> Shape:
    values = {name: getattr(shape, name) for name in Shape.__slots__}
    held = ((length, min(length, new)) for (length, _), new in zip(shape.rows, tokens, strict=True))
    return Shape(**{**values, "rows": tuple(held)})


def _prefill_finding(like: Problem, device: torch.device, backend: Backend, name: str, tokens: int) -> Finding:
    random = torch.Generator().manual_seed(tokens)
    _, query_heads, dim = like.q_TQD.shape
    kv_heads, dtype = like.cache.tables_RHP.shape[1], like.q_TQD.dtype
    q = torch.randn((tokens, query_heads, dim), generator=random).to(dtype)
    k, v = (torch.randn((tokens, kv_heads, dim), generator=random).to(dtype) for _ in range(2))
    rules = Rules(like.rules.scale, native_window=like.rules.native_window, softcap=like.rules.softcap)
    options = {"native_window": rules.native_window, "softcap": rules.softcap}
    moved = (x.to(device) for x in (q, k, v))
    got = ops.prefill_attention(*moved, scale=rules.scale, want_mass=True, backend=backend, **options)  # type: ignore[arg-type]
    return _errors("prefill", backend, name, dtype, got, reference.prefill(q, k, v, rules, True))


def move_findings(device: torch.device, backend: Backend) -> Iterator[Finding]:
    """Append, slot and page copies and swap against indexing on the host: bit for bit."""
    for dtype in DTYPES:
        random = torch.Generator().manual_seed(7)
        both = torch.randn((33, 2, 16, 40), generator=random).to(dtype)
        want = (both[:, 0].clone(), both[:, 1].clone(), torch.randint(0, 99, (33, 16), generator=random).int())
        there = both.to(device)
        got = (there[:, 0], there[:, 1], want[2].to(device))
        order = torch.randperm(33 * 16, generator=random)
        src, dst, slots = order[:101], order[101:202], order[202:212].view(5, 2)
        k, v = (torch.randn((5, 2, 40), generator=random).to(dtype) for _ in range(2))
        at = torch.arange(5, dtype=torch.int32)
        ids = torch.tensor([30, 4, 17], dtype=torch.int32)
        for pools, name in ((want, "torch"), (got, backend)):
            here = pools[2].device
            choice: Backend = "torch" if name == "torch" else backend
            ops.copy_slots(src.to(here), dst.to(here), *pools, backend=choice)
            ops.append_kv(k.to(here), v.to(here), at.to(here), slots.to(here), *pools, backend=choice)
            ops.copy_pages(ids.to(here), ids.to(here) + 1, *pools, backend=choice)
            host = ops.gather_pages(ids.to(here), *pools, backend=choice)
            if here.type == "cuda":
                torch.cuda.synchronize()
            ops.scatter_pages(ids.to(here) - 2, *host, *pools, backend=choice)
        gap = max(float((a.cpu().double() - b.double()).abs().max()) for a, b in zip(got, want, strict=True))
        kind = str(dtype).removeprefix("torch.")
        yield Finding("moves", backend, "append, copies, swap", kind, gap, 0.0, 0.0, gap == 0.0)


def speeds(device: torch.device, backend: Backend, small: bool) -> Iterator[speed.Speed]:
    """The measurements of this machine's size."""
    sizes = [(1, 1024), (4, 2048)] if small else [(1, 4096), (1, 131072), (8, 32768), (64, 4096), (64, 32768)]
    lengths = [512, 2048] if small else [2048, 8192, 32768]
    models = speed.MODELS[-1:] if small else speed.MODELS
    rows, pages = (16, 4096) if small else (64, 1 << 18)
    for dtype in (torch.bfloat16,) if device.type == "cuda" else (torch.bfloat16, torch.float32):
        yield from speed.decode_speeds(device, backend, dtype, models, sizes)
        yield from speed.prefill_speeds(device, backend, dtype, models, lengths)
        yield from speed.move_speeds(device, backend, dtype, models, rows, pages)


def machine(device: torch.device) -> dict[str, str]:
    """What this was run on."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "flashinfer-python", "vllm"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {**versions, "device": gpu, "threads": str(torch.get_num_threads())}


def main() -> int:
    """Command line; see the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--no-speed", action="store_true", help="correctness only")
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here: use --device cpu --small", file=sys.stderr)
        return 2
    began = time.perf_counter()
    device = torch.device(arguments.device)
    backends: list[Backend] = ["triton"] if device.type == "cuda" else ["native", "torch"]
    if device.type == "cpu" and ops.interpreted():
        backends.append("triton")
    findings: list[Finding] = []
    for backend in backends:
        findings += attention_findings(device, backend, arguments.small)
        findings += move_findings(device, backend)
    wrong = [finding for finding in findings if not finding.right]
    for finding in wrong:
        print(f"WRONG {finding}")
    worst = {
        kind: {name: max(getattr(f, name) for f in findings if f.dtype == kind) for name in ("out", "lse", "mass")}
        for kind in ("float32", "float16", "bfloat16")
    }
    print(f"{len(findings)} cases, {len(wrong)} wrong; worst error against float64: {json.dumps(worst)}")
    measured: list[speed.Speed] = []
    if not wrong and not arguments.no_speed:
        for item in speeds(device, backends[0], arguments.small):
            measured.append(item)
            beside = "" if item.reference_ms is None else f", SDPA contiguous {item.reference_ms:.3f} ms"
            beside += "" if item.flashinfer_ms is None else f", FlashInfer {item.flashinfer_ms:.3f} ms"
            what = f"{item.operation:18} {item.model:13} {item.dtype:9} {item.rows:3} x {item.context:6}"
            what += f" keep {item.keep:.1f} {item.layout:10}"
            print(
                f"{what} {item.ms:8.3f} ms {item.gb_per_s:7.1f} GB/s ({item.of_copy:4.0%} of copy{beside})", flush=True
            )
    if arguments.out:
        body = {
            "schema_version": 1,
            "machine": machine(device),
            "seconds": round(time.perf_counter() - began, 1),
            "worst": worst,
            "findings": [asdict(finding) for finding in findings],
            "speeds": [asdict(item) for item in measured],
        }
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(body, indent=1) + "\n")
    print(f"done in {time.perf_counter() - began:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
