"""Probing kvikio: a read into the GPU by a process of its own, with a time limit.

Where a driver is half there kvikio may fail, hang or end its process: none of that is to happen to a worker. Worst case:
the limit, and then POSIX.
"""

import json
import subprocess
import sys
from importlib.util import find_spec

import torch

from gpu_worker.direct.path import KvikioFound

PROBE_TIMEOUT_S = 60.0
_PROGRAM = r"""
import json, os, sys, tempfile
import torch
import kvikio, kvikio.cufile_driver, kvikio.defaults
is_gds = bool(kvikio.cufile_driver.get("is_gds_available"))
kvikio.defaults.set("compat_mode", kvikio.CompatMode.AUTO if is_gds else kvikio.CompatMode.ON)
data = os.urandom(8192)
with tempfile.NamedTemporaryFile() as file:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())
    into = torch.zeros(len(data), dtype=torch.uint8, device=sys.argv[1])
    torch.cuda.synchronize()
    with kvikio.CuFile(file.name, "r") as handle:
        count = handle.pread(into, len(data), 0).get()
if count != len(data) or bytes(into.cpu().tolist()) != data:
    raise SystemExit("a read into the GPU gave other bytes")
print(json.dumps({"version": kvikio.__version__, "is_gds": is_gds}))
"""


def probe_kvikio(device: torch.device, *, timeout_s: float = PROBE_TIMEOUT_S) -> KvikioFound | None:
    """Whether kvikio reads into a device; None for one that is no GPU. Takes seconds where there is one."""
    if device.type != "cuda":
        return None
    if find_spec("kvikio") is None:
        return KvikioFound("not installed: pip install 'ctxcache[direct]'")
    command = (sys.executable, "-c", _PROGRAM, str(device))
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        return KvikioFound(f"did not answer within {timeout_s:g} s")
    except OSError as error:
        return KvikioFound(f"cannot be tried: {error.strerror}")
    return read_answer(ran.returncode, ran.stdout, ran.stderr)


def read_answer(status: int, said: str, complained: str) -> KvikioFound:
    """What a probe's process said when it ended."""
    lines = said.strip().splitlines()
    if status or not lines:
        last = (complained.strip().splitlines() or [f"ended with status {status}"])[-1]
        return KvikioFound(last[:200])
    try:
        facts = json.loads(lines[-1])
        return KvikioFound("", is_gds=bool(facts["is_gds"]), version=str(facts["version"]))
    except (ValueError, KeyError, TypeError):
        return KvikioFound(f"said {lines[-1][:100]!r}")
