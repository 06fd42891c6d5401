"""Says which compile records under results/kernels are of other sources than today's. Exit 1 if any is.

    python tests/kernels/check_records.py [FOLDER]

Apart from the tests, since making a record again takes half an hour: `make check-records`, before a release.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kvgate.kernels import gate_records

RECORDS = Path(__file__).resolve().parents[2] / "results" / "kernels"


def main(folder: Path) -> int:
    """Print a line for each record."""
    wanted, stale = gate_records.source_hash(), 0
    for path in sorted(folder.glob("compile-*.json")):
        same = json.loads(path.read_text())["source_hash"] == wanted
        version = path.stem.removeprefix("compile-")
        fault = f"is of other sources: make check-triton VERSION={version}"
        print(f"{path.name} {'is of these sources' if same else fault}")
        stale += not same
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else RECORDS))
