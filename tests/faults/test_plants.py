"""Plants take: a control that is found because its server does not even start proves nothing."""

import os
import sys
import traceback

import pytest

from tests.faults import planted, plants  # noqa: F401  # they register


@pytest.mark.parametrize("name", sorted(planted.PLANTS))
def test_a_plant_takes_in_what_there_is_now(name: str) -> None:
    """It replaces names that the product has, in a process of its own."""
    child = os.fork()
    if not child:
        try:
            planted.plant_all(name)
        except BaseException:  # noqa: BLE001  # whatever it is, nobody else would say
            traceback.print_exc(file=sys.__stderr__)
            os._exit(1)
        os._exit(0)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
