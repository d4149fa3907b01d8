"""LMCache's file adapter, alone: `save` or `load` objects of random bytes. Runs in LMCache's environment.

    PYTHON lmcache_files.py save|load DIRECTORY COUNT SIZE_BYTES

The last line out of `load` is JSON: how many objects the adapter gave, and how many of those had other bytes.
Imports nothing of ours.
"""

import json
import random
import sys
import time
from importlib import import_module
from types import SimpleNamespace
from typing import Any

TIMEOUT_S = 120


def objects_of(count: int, size_bytes: int) -> list[tuple[bytes, bytes]]:
    """Keys and bytes, the same in each process."""
    draw = random.Random(3)  # noqa: S311
    return [(draw.randbytes(32), draw.randbytes(size_bytes)) for _ in range(count)]


def main() -> None:
    """See the module."""
    # By name: an environment that checks this has no LMCache.
    api = import_module("lmcache.v1.distributed.api")
    files = import_module("lmcache.v1.distributed.l2_adapters.fs_l2_adapter")
    what, directory, count, size_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    adapter: Any = files.FSL2Adapter(files.FSL2AdapterConfig(directory))
    objects = objects_of(count, size_bytes)
    keys = [api.ObjectKey(key, "model", 0) for key, _ in objects]
    if what == "save":
        adapter.submit_store_task(keys, [SimpleNamespace(byte_array=content) for _, content in objects])
        _wait_for(adapter.pop_completed_store_tasks)
        return
    room = [bytearray(size_bytes) for _ in objects]
    task = adapter.submit_load_task(keys, [SimpleNamespace(byte_array=memoryview(one)) for one in room])
    loaded = _wait_for(lambda: adapter.query_load_result(task))
    given = loaded.get_indices_list()
    wrong_count = sum(room[i] != objects[i][1] for i in given)
    sys.stdout.write("\n" + json.dumps({"given": len(given), "wrong": wrong_count}) + "\n")


def _wait_for(ask: Any) -> Any:
    end_s = time.monotonic() + TIMEOUT_S
    while not (found := ask()):
        if found is not None and not isinstance(found, dict):
            return found
        if time.monotonic() > end_s:
            sys.exit("LMCache's adapter does not end")
        time.sleep(0.01)
    return found


if __name__ == "__main__":
    main()
