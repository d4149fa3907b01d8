"""Short slices are asked for, threads inherit them, and nothing else changes."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ctxcache.runtime.threads import SLICE_NS, shorten_time_slices

ASK = """
import json, os, sys, threading
from ctxcache.runtime import threads
from ctxcache.runtime.threads import shorten_time_slices

# The parent of this process may have a short slice already, which it passes on.
# A slice that was not asked for is the usual one.
threads.SLICE_NS, short_ns = 0, threads.SLICE_NS
shorten_time_slices()
threads.SLICE_NS = short_ns

def facts():
    lines = open(f"/proc/self/task/{threading.get_native_id()}/sched").read().splitlines()
    slices = [int(line.split(":")[1]) for line in lines if line.startswith("se.slice ")]
    return slices, os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)

os.nice(3)
os.sched_setscheduler(0, int(sys.argv[1]), os.sched_param(0))
before = facts()
agreed = shorten_time_slices()
found = []
thread = threading.Thread(target=lambda: found.append(facts()))
thread.start()
thread.join()
print(json.dumps([agreed, before, facts(), found[0]]))
"""
HAS_SLICES = platform.system() == "Linux" and "se.slice " in (
    Path("/proc/self/sched").read_text() if Path("/proc/self/sched").exists() else ""
)


def ask(policy: int) -> list[Any]:
    """Whether it was agreed to; slice, policy and niceness before, after, and of a thread begun after."""
    command = [sys.executable, "-c", ASK, str(policy)]
    found: list[Any] = json.loads(subprocess.check_output(command, text=True))
    return found


@pytest.mark.skipif(not HAS_SLICES, reason="this kernel does not tell threads' slices")
@pytest.mark.parametrize("policy", [0, 3], ids=["SCHED_OTHER", "SCHED_BATCH"])
def test_threads_begun_later_have_the_short_slice_too(policy: int) -> None:
    """Policy and niceness stay."""
    agreed, (slices, *others), after, of_thread = ask(policy)

    assert agreed
    assert slices != [SLICE_NS]
    assert after == of_thread == [[SLICE_NS], *others]
    assert others == [policy, min(os.getpriority(os.PRIO_PROCESS, 0) + 3, 19)]


def test_where_it_cannot_be_had_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine whose numbers we do not know nothing is called."""
    monkeypatch.setattr(platform, "machine", lambda: "unknown")

    assert not shorten_time_slices()
