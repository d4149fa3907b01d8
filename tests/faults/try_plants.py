"""Each plant once, in a process of its own: `python -m tests.faults.try_plants` prints what failed.

The answer is JSON: the name of each plant, and the traceback of the one that found nothing to replace, or "".
Run it as a process. It forks, and a process that has used gRPC must not.
"""

import json
import os
import sys
import traceback

from tests.faults import planted, plants  # noqa: F401  # they register


def _try(name: str) -> str:
    """The traceback of planting `name`, or "" when it took."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        try:
            planted.plant_all(name)
        except BaseException:  # noqa: BLE001  # whatever it is, nobody else would say
            os.write(writes, traceback.format_exc()[-4_000:].encode())
            os._exit(1)
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as answers:
        said = answers.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return said or (f"exit code {code}" if code else "")


if __name__ == "__main__":
    json.dump({name: _try(name) for name in sorted(planted.PLANTS)}, sys.stdout)
