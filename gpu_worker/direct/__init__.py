"""Direct storage: sessions that lie only on SSD, read past the store's arena, into the GPU where that works.

Pure: the paths from file to device, and the choice among those that a machine has. Worst case: no path,
and everything comes through the store, with the reason. See docs/worker.md.
"""

import enum
from dataclasses import dataclass


class DirectPath(enum.StrEnum):
    """From the file to the device, the best first."""

    GDS = "gds"
    """Into the GPU, by the disk itself."""
    COMPAT = "kvikio-compat"
    """Into the GPU, by kvikio through the host's memory."""
    POSIX = "posix"
    """Into staging memory of the host, and onto the device from there."""
    OFF = "off"
    """Through the store."""


class Wanted(enum.StrEnum):
    """The path that a worker is asked for: the best there is, or a path not to go beyond."""

    AUTO = "auto"
    GDS = "gds"
    COMPAT = "kvikio-compat"
    POSIX = "posix"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class Live:
    """The path that is used, and why none better is."""

    path: DirectPath
    reason: str


@dataclass(frozen=True, slots=True)
class KvikioFound:
    """The result of probing kvikio. `problem`: why it cannot be used; empty: it read into the GPU."""

    problem: str
    is_gds: bool = False
    version: str = ""


# Paths by what is wanted (columns) and what the machine has (rows):
#
#                       auto     gds      kvikio-compat   posix    off
#     GDS works         gds      gds      kvikio-compat   posix    off
#     kvikio alone      compat   compat   kvikio-compat   posix    off
#     kvikio fails      posix    posix    posix           posix    off
#     no GPU            off      posix    posix           posix    off
def choose(wanted: Wanted, kvikio: KvikioFound | None) -> Live:
    """The path for what is wanted. `kvikio`: the result of its probe, None where there is no GPU."""
    if wanted is Wanted.OFF:
        return Live(DirectPath.OFF, "switched off")
    if wanted is Wanted.POSIX:
        return Live(DirectPath.POSIX, "asked for")
    if kvikio is not None:
        return _on_gpu(wanted, kvikio)
    # The store's read stays in the arena for all who come
    # after; without a GPU nothing is gained by going past it.
    if wanted is Wanted.AUTO:
        return Live(DirectPath.OFF, "no GPU to read into; what the store reads stays for the next one")
    return Live(DirectPath.POSIX, f"no GPU to read into by {wanted.value}")


def _on_gpu(wanted: Wanted, kvikio: KvikioFound) -> Live:
    if kvikio.problem:
        return Live(DirectPath.POSIX, f"kvikio: {kvikio.problem}")
    if kvikio.is_gds and wanted is not Wanted.COMPAT:
        return Live(DirectPath.GDS, f"kvikio {kvikio.version} with GPUDirect Storage")
    why = "asked for" if wanted is Wanted.COMPAT else "without GPUDirect Storage"
    return Live(DirectPath.COMPAT, f"kvikio {kvikio.version}, {why}")
