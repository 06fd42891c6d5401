"""Breaks the manager in many ways, one at a time, and sees whether the stateful test notices.

``python tests/lifecycle/mutants.py [name ...]`` prints one line per mutant and exits 1 if one survives. Each mutant is
a copy of the package with one piece of text replaced; the tree itself is never touched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_suffix(".yaml")
TEST = ROOT / "tests" / "lifecycle" / "test_stateful.py"


@dataclass(frozen=True)
class Mutant:
    """Replaces ``old`` (which must occur exactly once) by ``new`` in a file of lifecycle/."""

    name: str
    file: str
    old: str
    new: str


def load() -> list[Mutant]:
    """All mutants of the list."""
    return [Mutant(**raw) for raw in yaml.safe_load(LIST.read_text())]


def survives(mutant: Mutant, examples: int = 80) -> bool:
    """True if the stateful test passes on the mutant. Raises ValueError if its text is not there exactly once."""
    with tempfile.TemporaryDirectory() as scratch:
        package = Path(scratch) / "kvgate"
        package.mkdir()
        for name in ("__init__.py", "strict_yaml.py", "typed.py"):
            shutil.copy(ROOT / "src" / "kvgate" / name, package)
        shutil.copytree(ROOT / "lifecycle", package / "lifecycle", ignore=shutil.ignore_patterns("__pycache__"))
        target = package / "lifecycle" / mutant.file
        text = target.read_text()
        if text.count(mutant.old) != 1:
            raise ValueError(f"{mutant.name}: its text occurs {text.count(mutant.old)} times in {mutant.file}")
        target.write_text(text.replace(mutant.old, mutant.new))
        environment = {**os.environ, "PYTHONPATH": scratch, "KVGATE_STATEFUL_EXAMPLES": str(examples)}
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", str(TEST)]
        done = subprocess.run(command, env=environment, capture_output=True, cwd=ROOT, timeout=300, check=False)
        if done.returncode not in (0, 1):
            raise RuntimeError(f"{mutant.name}: the test did not run: {done.stdout.decode()[-400:]}")
        return done.returncode == 0


def main() -> int:
    """Run all mutants, or those whose name contains an argument."""
    chosen = [m for m in load() if not sys.argv[1:] or any(a in m.name for a in sys.argv[1:])]
    alive = []
    for mutant in chosen:
        alive += [mutant.name] if survives(mutant) else []
        print(f"{'SURVIVED' if mutant.name in alive[-1:] else 'caught':9} {mutant.file:18} {mutant.name}", flush=True)
    print(f"{len(chosen) - len(alive)} of {len(chosen)} caught")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
