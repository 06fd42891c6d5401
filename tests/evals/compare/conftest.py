"""Makes this folder's helpers importable by name."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "helpers"))
