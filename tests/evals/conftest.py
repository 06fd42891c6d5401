"""Makes ``helpers`` importable by name: pytest's importlib mode puts no folder of tests on the path."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "helpers"))
