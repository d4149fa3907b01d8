"""The rig of the services' tests serves here too, and the tables of alerts and panels are tested."""

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT / "tests" / "service"), str(ROOT / "scripts")]
