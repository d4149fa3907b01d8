"""The image's recipe, as far as it can be looked at without building it."""

import re
import subprocess
import sys
from pathlib import Path

from chart import ROOT

DOCKERFILE = ROOT / "Dockerfile"


def test_the_linter_has_nothing_to_say() -> None:
    """hadolint, every rule."""
    done = subprocess.run(
        [Path(sys.executable).parent / "hadolint", DOCKERFILE],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_nobody_is_root() -> None:
    """Every image that is handed out ends with the chart's user."""
    stages = re.split(r"^FROM ", DOCKERFILE.read_text(), flags=re.MULTILINE)[1:]
    final = [stage for stage in stages if re.search(r" AS (store|worker)$", stage, re.MULTILINE)]
    assert len(final) == 2
    for stage in final:
        assert re.findall(r"^USER (.+)$", stage, re.MULTILINE)[-1:] == ["10001:10001"]
