"""Makes the helpers of the other rooms importable by name, and this room's own."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parent / "helpers"), str(Path(__file__).parents[1] / "evals" / "helpers")]
