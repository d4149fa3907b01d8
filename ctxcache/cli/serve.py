"""`ctxcache serve`: settings in, a running server out, until a signal ends it.

The one command that builds a server; it imports what that takes only when it runs. Worst case: the
server cannot start, which `main` turns into one sentence and an exit code.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxcache import __version__
from ctxcache.cli.call import CONTEXT, Output, OutputOption, call_of
from ctxcache.cli.ready import Place, Ready
from ctxcache.cli.signature import option, with_signature

if TYPE_CHECKING:
    from ctxcache.server import Server

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


@dataclass(frozen=True, slots=True)
class Setting:
    """An option of `serve` for one field of `config.Settings`, whose text `config.load` reads."""

    metavar: str
    help: str
    default: str


# Written out, not derived from Settings: pydantic takes longer to import than all of --help.
SETTINGS = {
    "data_directory": Setting("DIR", "Where metadata and SSD files lie.", "~/.local/state/ctxcache"),
    "listen": Setting("HOST:PORT", "TCP address; port 0 takes a free one; empty for none.", "127.0.0.1:7420"),
    "unix_socket": Setting("PATH", "Unix socket; `auto` is in the data directory; empty for none.", "auto"),
    "arena_directory": Setting("DIR", "Where the DRAM arena's file lies: a tmpfs.", "/dev/shm"),  # noqa: S108
    "arena_size_bytes": Setting(
        "SIZE", "Size of the arena, such as 8GiB.", "a quarter of the memory, at most 8GiB"
    ),
    "ssd_directories": Setting(
        "DIR", "Directory of the SSD tier; repeat for more.", "ssd in the data directory"
    ),
    "ssd_size_bytes": Setting("SIZE", "Size of each SSD file.", "a fifth of the free space, at most 32GiB"),
    "default_ttl_s": Setting("SECONDS", "Life of a session after an access, unless it says.", "3600"),
    "max_concurrent_rpcs": Setting("COUNT", "Rpcs at a time; more are refused.", "256"),
    "drain_timeout_s": Setting("SECONDS", "How long running rpcs may take to end.", "30"),
    "log_level": Setting("LEVEL", "debug, info, warning or error; logs go to stderr.", "info"),
}
_CONFIG = Annotated[
    Path | None,
    typer.Option("--config", envvar="CTXCACHE_CONFIG", metavar="FILE.toml", help="File with settings."),
]


def serve_command() -> Callable[..., None]:
    """Return `serve` with an option for every setting."""
    settings = [option(name, _annotation(name, setting)) for name, setting in SETTINGS.items()]
    parameters = [CONTEXT, option("config", _CONFIG), *settings, option("output", OutputOption)]
    return with_signature(serve, parameters, name="serve", doc=serve.__doc__)


def serve(context: typer.Context, config: Path | None, **given: Any) -> None:
    """Run the server until SIGTERM or Ctrl-C.

    Works without any configuration. Options win over CTXCACHE_ variables, those over --config.
    """
    from ctxcache import config as configuration  # noqa: PLC0415  see the module's docstring
    from ctxcache import server  # noqa: PLC0415

    output = call_of(context, given).output
    # An option that may be repeated and was not is an empty list.
    arguments = {name: None if value == [] else value for name, value in given.items()}
    settings = configuration.load(arguments, file=config)
    logging.basicConfig(level=settings.log_level.upper(), stream=sys.stderr, format=LOG_FORMAT)
    asyncio.run(server.serve(settings, lambda running: _announce(running, output)))
    _say("stopped: everything is on disk")


def _annotation(name: str, setting: Setting) -> object:
    shown = typer.Option(
        f"--{name.replace('_', '-')}",
        metavar=setting.metavar,
        help=setting.help,
        show_default=setting.default,
    )
    # A list's text is one value per occurrence; every other option is given once.
    return Annotated[list[str] | None, shown] if name == "ssd_directories" else Annotated[str | None, shown]


def _announce(server: "Server", output: Output) -> None:
    facts = _facts(server)
    sys.stdout.write((facts.json_line() if output is Output.JSON else facts.text()) + "\n")
    sys.stdout.flush()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        # On top of the loop's own handler, not in its place: that one is called through its wakeup
        # descriptor, which Python writes to for every signal that has a handler at all.
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(_say, "draining: no new work is taken"))


def _facts(server: "Server") -> Ready:
    storage = server.storage
    arena, ssd = storage.arena, storage.ssd
    return Ready(
        version=__version__,
        pid=os.getpid(),
        listen_addresses=server.addresses,
        data_directory=str(storage.directory.path.absolute()),
        arena=Place(arena.paths[0], arena.capacities_bytes[0], "memory", "shared memory"),
        ssd=tuple(
            Place(mode.path, size_bytes, "direct" if mode.is_direct else "buffered", mode.reason)
            for mode, size_bytes in zip(ssd.io_modes, ssd.capacities_bytes, strict=True)
        ),
        session_count=sum(1 for _ in storage.metadata.sessions()),
    )


def _say(sentence: str) -> None:
    sys.stderr.write(f"ctxcache: {sentence}\n")
    sys.stderr.flush()
