"""`ctxcache serve`: settings in, a running server out, until a signal ends it.

The one command that builds a server. Once the server listens, the command says so: facts for people, or the
same facts as one line of JSON. docs/operations.md has the names of that line, for which scripts wait. Worst
case: the server cannot start, which `main` turns into one sentence and an exit code.
"""

import asyncio
import json
import logging
import os
import signal
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import typer

from ctxcache.cli.documents import Output, examples
from ctxcache.cli.failures import ExitCode
from ctxcache.cli.options import shared_of
from ctxcache.cli.settings import load_settings, taking_settings
from ctxcache.cli.units import counted, human_size
from ctxcache.runtime.files import keep_private
from ctxcache.runtime.logs import log_to
from ctxcache.runtime.memory import check_address_space, keep_freed_memory, look_seldom_at_what_stays
from ctxcache.runtime.sockets import raise_limit
from ctxcache.runtime.threads import shorten_time_slices, switch_threads_often
from ctxcache.server import lifecycle
from ctxcache.server.server import Server


@dataclass(frozen=True, slots=True)
class TierFile:
    """A file of a tier. `io_mode` is `memory`, `direct` or `buffered`; `reason` says why, and which pages."""

    path: str
    size_bytes: int
    io_mode: str
    reason: str


@dataclass(frozen=True, slots=True)
class Ready:
    """A server that listens.

    `listen_addresses` are gRPC targets, `bulk_addresses` where the bulk channel is. `unset_sizes` are the
    settings of sizes that nobody has set.
    """

    version: str
    pid: int
    listen_addresses: tuple[str, ...]
    bulk_addresses: tuple[str, ...]
    data_directory: str
    control_socket: str
    metrics_address: str
    arena: TierFile
    ssd: tuple[TierFile, ...]
    session_count: int
    unset_sizes: tuple[str, ...]

    def json_line(self) -> str:
        """One line, its names stable."""
        return json.dumps({"event": "ready", **asdict(self)}, separators=(",", ":"))

    def text(self) -> str:
        """A few lines for people."""
        lines = [f"ctxcache {self.version} is ready (pid {self.pid})"]
        lines += [f"  listens on  {address}" for address in self.listen_addresses]
        lines += [f"  bulk        {address}" for address in self.bulk_addresses]
        lines.append(f"  data        {self.data_directory}, {counted(self.session_count, 'session')} found")
        place = f"{human_size(self.arena.size_bytes)} at {self.arena.path}"
        lines.append(f"  DRAM        {place}, {self.arena.reason}")
        lines.append(f"  local       {self.control_socket or 'by gRPC: no control socket'}")
        lines.append(f"  metrics     {self._metrics()}")
        lines += [
            f"  SSD         {human_size(place.size_bytes)} at {place.path}, {place.io_mode} I/O"
            for place in self.ssd
        ]
        if self.unset_sizes:
            options = " and ".join(f"--{name.replace('_', '-')}" for name in self.unset_sizes)
            lines.append(f"  sizes       chosen by the store; {options} set them")
        return "\n".join(lines)

    def _metrics(self) -> str:
        return f"http://{self.metrics_address}/metrics" if self.metrics_address else "none"


GRPC_LOGGER = "grpc._cython.cygrpc"
app = typer.Typer()


@app.command("serve", epilog=examples("ctxcache serve", "ctxcache serve --config ctxcache.toml"))
@taking_settings()
def serve(context: typer.Context, **given: Any) -> None:
    """Run the server until SIGTERM or Ctrl-C.

    Works without any configuration. Options win over CTXCACHE_ variables, those over --config.
    """
    # `load_settings` takes names out of what it is given; a reload reads the same words again.
    as_given = dict(given)
    settings = load_settings(given)
    # The order below: modes before any file is made, the bound on memory before anything large is mapped, the
    # limit of descriptors before anything is opened, time slices before any thread.
    keep_private()
    check_address_space(settings.arena_size_bytes)
    output = shared_of(context, given).output
    log_to(sys.stderr, level=settings.log_level, is_json=settings.log_format == "json")
    logging.getLogger(GRPC_LOGGER).addFilter(_is_no_vanished_peer)
    keep_freed_memory()
    raise_limit()
    look_seldom_at_what_stays()
    # Before any thread is begun.
    shorten_time_slices()
    switch_threads_often()
    asyncio.run(
        lifecycle.serve(
            settings,
            lambda running: _announce(running, output),
            _end_unfinished,
            _end_start,
            lambda: load_settings(dict(as_given)),
        )
    )
    _say("stopped: everything is on disk")


def _is_no_vanished_peer(record: logging.LogRecord) -> bool:
    """Whether a line of gRPC's is more than the traceback it logs when a client goes away under a write."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or kind.__name__ != "ExecuteBatchError"


def _announce(server: Server, output: Output) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        # On top of the loop's own handler, not in its place: that one is called through its wakeup
        # descriptor, which Python writes to for every signal that has a handler at all.
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(_say, "draining: no new work is taken"))
    # After that, and at once: whoever waits for these lines may send the signal as soon as they are there.
    facts = _facts(server)
    sys.stdout.write((facts.text() if output is Output.TABLE else facts.json_line()) + "\n")
    sys.stdout.flush()


def _end_unfinished(server: Server) -> None:
    """Give up a flush that does not end: a process that neither serves nor goes is of no use to anybody."""
    settings = server.settings
    _say(
        f"the end took longer than {settings.drain_timeout_s:g} + {settings.flush_timeout_s:g} s; what was "
        "not on disk by then is lost (TIER_FAILURE)"
    )
    server.storage.arena.unlink()
    # Neither `finally` nor exit handlers: they would wait for the very thread that hangs.
    os._exit(ExitCode.DEVICE)


def _end_start() -> None:
    """End a start, wherever it is. Called by a signal, so that what Python buffers may be half written."""
    try:
        os.write(sys.stderr.fileno(), b"ctxcache: stopped before it was ready\n")
    finally:
        os._exit(ExitCode.OK)


def _facts(server: Server) -> Ready:
    storage = server.storage
    arena, ssd = storage.arena, storage.ssd
    return Ready(
        version=version("ctxcache"),
        pid=os.getpid(),
        listen_addresses=server.addresses,
        bulk_addresses=server.bulk_addresses,
        data_directory=str(storage.directory.path.absolute()),
        control_socket=server.control_socket,
        metrics_address=server.metrics_address,
        arena=TierFile(arena.paths[0], arena.capacities_bytes[0], "memory", arena.pages_reason),
        ssd=tuple(
            TierFile(mode.path, size_bytes, "direct" if mode.is_direct else "buffered", mode.reason)
            for mode, size_bytes in zip(ssd.io_modes, ssd.capacities_bytes, strict=True)
        ),
        session_count=server.session_count,
        unset_sizes=tuple(
            name for name in ("arena_size_bytes", "ssd_size_bytes") if not getattr(server.settings, name)
        ),
    )


def _say(sentence: str) -> None:
    """Tell people. A log that takes no more, on a full disk for one, changes nothing of how a server ends."""
    with suppress(OSError):
        sys.stderr.write(f"ctxcache: {sentence}\n")
        sys.stderr.flush()
