"""Plants take: a control that is found because its server does not even start proves nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults import planted, plants  # noqa: F401  # they register

_ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tried() -> dict[str, str]:
    """By plant: the fault that was found when it was planted, "" for none."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.faults.try_plants"],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    answer: dict[str, str] = json.loads(process.stdout)
    return answer


@pytest.mark.parametrize("name", sorted(planted.PLANTS))
def test_a_plant_takes_in_what_there_is_now(name: str, tried: dict[str, str]) -> None:
    """It replaces names that the product has, in a process of its own."""
    assert tried[name] == ""


def test_a_plant_that_replaces_nothing_is_told() -> None:
    """The control: a name that the product has not is a traceback."""
    code = (
        "from tests.faults import planted, try_plants\n"
        "def nothing(number):\n"
        "    from ctxcache.cache import no_such_name\n"
        "planted.PLANTS['nothing'] = nothing\n"
        "print(try_plants._try('nothing'))\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=_ROOT, capture_output=True, text=True, check=False
    )
    assert "no_such_name" in process.stdout, process.stderr
