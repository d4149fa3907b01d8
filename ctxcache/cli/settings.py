"""The options of `serve` and `doctor`: one per field of `config.Settings`, and the file.

Texts only: `config.load` reads them, as it reads the environment and the file. Written out, not
derived from Settings: pydantic takes longer to import than all of --help.
"""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ctxcache.cli.signature import option

if TYPE_CHECKING:
    from ctxcache.config import Settings


@dataclass(frozen=True, slots=True)
class Setting:
    """How an option for one field of `config.Settings` is shown."""

    metavar: str
    help: str
    default: str


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
    "max_local_clients": Setting("COUNT", "Clients that map the arena at a time; more are refused.", "256"),
    "drain_timeout_s": Setting("SECONDS", "How long running rpcs may take to end.", "30"),
    "log_level": Setting("LEVEL", "debug, info, warning or error; logs go to stderr.", "info"),
}
_CONFIG = Annotated[
    Path | None,
    typer.Option("--config", envvar="CTXCACHE_CONFIG", metavar="FILE.toml", help="File with settings."),
]


def setting_options() -> list[inspect.Parameter]:
    """Return the parameters of a command that takes settings."""
    settings = [option(name, _annotation(name, setting)) for name, setting in SETTINGS.items()]
    return [option("config", _CONFIG), *settings]


def load_settings(given: dict[str, Any]) -> "Settings":
    """Take the settings out of what a command was given. Raises InvalidConfiguration."""
    from ctxcache.config import load  # noqa: PLC0415  see the module's docstring

    file = given.pop("config")
    # An option that may be repeated and was not is an empty list.
    arguments = {name: None if (value := given.pop(name)) == [] else value for name in SETTINGS}
    return load(arguments, file=file)


def _annotation(name: str, setting: Setting) -> object:
    shown = typer.Option(
        f"--{name.replace('_', '-')}",
        metavar=setting.metavar,
        help=setting.help,
        show_default=setting.default,
    )
    # A list's text is one value per occurrence; every other option is given once.
    return Annotated[list[str] | None, shown] if name == "ssd_directories" else Annotated[str | None, shown]
