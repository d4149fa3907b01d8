"""Freed memory is kept where it pays, and left alone where somebody says so."""

import os
import subprocess
import sys

import pytest

REUSE = """
import resource
from ctxcache.malloc import keep_freed_memory
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
