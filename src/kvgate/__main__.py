"""``python -m kvgate``."""

import sys

from kvgate.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
