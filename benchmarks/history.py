"""Speed over time: kernel and lifecycle benchmarks, compared with this machine's last run, and kept.

    python benchmarks/history.py [--file results/benchmarks/history.jsonl] [--tolerance 1.5]

One line a run. A figure whose unit is in its name is compared: more milliseconds or microseconds, or fewer things a
second, beyond the tolerance is listed, and the exit code is 1. Other figures are kept and not judged. The first run of
a machine has nothing to be compared with.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SCRIPTS: Mapping[str, str] = {"kernels_cpu": "--out", "lifecycle": "--json"}
SLOWER = ("ms", "us", "milliseconds", "microseconds", "seconds")  # a larger figure is a slower one
FASTER = ("per_s", "per_second")


def figures(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number of nested data with the keys that lead to it; an entry of a list is named by its texts."""
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        yield path, float(value)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from figures(inner, f"{path}/{key}")
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            texts = [text for text in inner.values() if isinstance(text, str)] if isinstance(inner, Mapping) else []
            yield from figures(inner, f"{path}/{', '.join(texts) or place}")


def slowdown(name: str, before: float, now: float) -> float | None:
    """How many times slower ``now`` is; None for a figure that is no speed."""
    words = name.split("/")
    if before <= 0 or now <= 0:
        return None
    if any(word.endswith(FASTER) for word in words):
        return before / now
    return now / before if any(word.split("_")[-1] in SLOWER for word in words) else None


def slower(before: Mapping[str, float], now: Mapping[str, float], tolerance: float) -> list[str]:
    """A line for every figure that is slower than ``tolerance`` times."""
    found = []
    for name in sorted(before.keys() & now.keys()):
        times = slowdown(name, before[name], now[name])
        if times is not None and times > tolerance:
            found.append(f"{name}: {before[name]:.4g} -> {now[name]:.4g}, {times:.2f} times slower")
    return found


def last_of(file: Path, machine: Mapping[str, Any]) -> dict[str, Any] | None:
    """The newest line of this machine."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    entries: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return next((entry for entry in reversed(entries) if entry["machine"] == machine), None)


def measured() -> dict[str, float]:
    """The figures of all scripts, run now; what they print is shown."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, option in SCRIPTS.items():
            out = Path(folder) / f"{name}.json"
            subprocess.run([sys.executable, str(HERE / f"{name}.py"), option, str(out)], check=True)
            found.update(figures(json.loads(out.read_text(encoding="utf-8")), name))
    return found


def main() -> int:
    """Measure, compare, append. Returns 1 if something became slower."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", type=Path, default=Path("results/benchmarks/history.jsonl"))
    parser.add_argument("--tolerance", type=float, default=1.5)
    options = parser.parse_args()
    machine = {"node": platform.node(), "processor": platform.machine(), "cpus": os.cpu_count()}
    before, now = last_of(options.file, machine), measured()
    git = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True)
    options.file.parent.mkdir(parents=True, exist_ok=True)
    with options.file.open("a", encoding="utf-8") as file:
        entry = {"revision": git.stdout.strip(), "machine": machine, "figures": now}
        file.write(json.dumps(entry, sort_keys=True) + "\n")
    worse = slower(before["figures"], now, options.tolerance) if before else []
    print("\n".join(worse) or ("nothing slower" if before else "first run of this machine: nothing to compare with"))
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
