"""Freed memory is kept where it pays, and left alone where somebody says so."""

import json
import os
import subprocess
import sys

import pytest

from ctxcache.runtime.memory import KEPT_BYTES

REUSE = """
import resource
from ctxcache.runtime.memory import keep_freed_memory
is_kept = keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    block = bytearray(8 << 20)
    del block
before = faults()
for _ in range(20):
    block = bytearray(8 << 20)
    del block
print(is_kept, faults() - before)
"""


def run(**environment: str) -> tuple[bool, int]:
    """Whether memory is kept, and the page faults of twenty blocks of 8 MiB."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    printed = subprocess.run(
        [sys.executable, "-c", REUSE], env=clean | environment, check=True, capture_output=True, text=True
    ).stdout.split()
    return printed[0] == "True", int(printed[1])


@pytest.mark.skipif("glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""), reason="glibc only")
def test_freed_memory_is_used_again_without_page_faults() -> None:
    """The 2,048 pages of a block are mapped once, not once per block."""
    is_kept, fault_count = run()

    assert is_kept
    assert fault_count < 2048


@pytest.mark.parametrize(
    "setting",
    [
        {"CTXCACHE_MALLOC": "default"},
        {"MALLOC_TOP_PAD_": "1048576"},
        {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"},
    ],
)
def test_somebody_elses_settings_are_left_alone(setting: dict[str, str]) -> None:
    """An operator who tunes malloc, or says that we must not, is obeyed."""
    assert not run(**setting)[0]


GIVE_BACK = """
import asyncio, json
from ctxcache.runtime import memory as malloc
from ctxcache.runtime.memory import give_back_unused, keep_freed_memory, own_bytes
keep_freed_memory()
malloc.LOOK_INTERVAL_S = 0.01
LOOKS = 20
async def main():
    task = asyncio.create_task(give_back_unused())
    await asyncio.sleep(0)
    before = own_bytes()
    crowd = [bytearray(b"x" * 100_000) for _ in range(4000)]
    kept = crowd[-1]
    during = own_bytes()
    # While the crowd is there nothing can be given back, and that is not what the process needs for ever.
    await asyncio.sleep(LOOKS * malloc.LOOK_INTERVAL_S)
    del crowd[2000:]
    await asyncio.sleep(LOOKS * malloc.LOOK_INTERVAL_S)
    del crowd
    freed = own_bytes()
    while own_bytes() > before + malloc.KEPT_BYTES:
        await asyncio.sleep(0.01)
    print(json.dumps([before, during, freed, own_bytes(), len(kept)]))
    task.cancel()
asyncio.run(asyncio.wait_for(main(), 60))
"""


@pytest.mark.skipif("glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""), reason="glibc only")
def test_what_a_crowd_has_left_is_given_back() -> None:
    """Kept at first, for what comes next; not for ever."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    printed = subprocess.run(
        [sys.executable, "-c", GIVE_BACK], env=clean, check=True, capture_output=True, text=True
    ).stdout
    before, during, freed, after, _ = json.loads(printed)

    assert during > before + 400_000_000
    assert freed > before + KEPT_BYTES
    assert after <= before + KEPT_BYTES


CIRCLES = """
import gc, sys
from ctxcache.runtime import memory as malloc
malloc.GROWTH_OBJECTS, malloc.COLLECTIONS_PER_COUNT = 1000, int(sys.argv[1])
malloc.look_seldom_at_what_stays()
class Circle:
    count = most = 0
    def __init__(self):
        self.me = self
        Circle.count += 1
        Circle.most = max(Circle.most, Circle.count)
    def __del__(self):
        Circle.count -= 1
gc.collect()
for _ in range(200):
    under_way = [Circle() for _ in range(1000)]
    gc.collect()
print(Circle.most, gc.get_freeze_count() > 0)
"""


def most_circles(collections_per_count: int) -> int:
    """The most objects in circles at one time, of a thousand new ones for each of 200 full collections."""
    printed = subprocess.run(
        [sys.executable, "-c", CIRCLES, str(collections_per_count)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert printed[1] == "True"
    return int(printed[0])


def test_circles_that_outlive_a_collection_go_in_the_end() -> None:
    """Objects that stay are not looked at each time, and do not grow without bound.

    A look at all comes when it has doubled.
    """
    assert most_circles(4) < 50_000


def test_without_a_look_at_all_circles_would_stay() -> None:
    """Or the test above means nothing."""
    assert most_circles(1000) > 150_000
