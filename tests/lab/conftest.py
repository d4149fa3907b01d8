"""Helpers of other folders' tests are found by name: the command line's, the simulator's, and tiny models."""

import sys
from pathlib import Path

for folder in ("cli", "gpu_worker", "simulate"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
