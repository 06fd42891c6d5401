"""Test set-up that must happen before anything imports triton (transformers does)."""

import os
import sys

# Triton reads this once, at import: setting it later would silently leave the kernels uncompiled and unrun.
if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError("triton was imported before conftest.py could set TRITON_INTERPRET=1")
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
