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
    "control_socket": Setting("PATH", "Socket of local clients; `auto` as above; empty for none.", "auto"),
    "tls_certificate": Setting("FILE", "Certificate of the TCP ports, PEM; none: no TLS.", "none"),
    "tls_key": Setting("FILE", "Its key, PEM.", "none"),
    "tls_client_ca": Setting("FILE", "Authorities of clients' certificates, PEM.", "none"),
    "insecure_listen": Setting("BOOL", "Listen off loopback without TLS.", "false"),
    "bulk_listen": Setting(
        "HOST:PORT", "Bulk channel; `auto` is a free port beside the TCP address; empty for none.", "auto"
    ),
    "arena_directory": Setting("DIR", "Where the DRAM arena's file lies: a tmpfs.", "/dev/shm"),  # noqa: S108
    "arena_size_bytes": Setting(
        "SIZE", "Size of the arena, such as 8GiB.", "a quarter of the memory, at most 8GiB"
    ),
    "arena_huge_pages": Setting("WORD", "auto, on or off: reserved 2 MiB pages for the arena.", "auto"),
    "arena_prefault": Setting("BOOL", "Touch the arena's pages ahead of use, in the background.", "true"),
    "dram_low_watermark": Setting(
        "SHARE", "Of the arena: when less is free, clean segments leave.", "0.0625"
    ),
    "dram_high_watermark": Setting("SHARE", "Of the arena: when as much is free, they stay.", "0.125"),
    "dirty_watermark": Setting("SHARE", "Of the arena: more than that is written at once.", "0.25"),
    "dirty_limit": Setting("SHARE", "Of the arena: never more is without a copy on SSD.", "0.75"),
    "tail_age_s": Setting("SECONDS", "Age at which a growing segment is written; 0 for never.", "30"),
    "write_behind_bytes_per_s": Setting(
        "SIZE", "Most that is written per second though nobody waits; 0 for no bound.", "0"
    ),
    "placement_policy": Setting("WORD", "Who leaves first: lru, fifo, t-lru, look-ahead, value.", "value"),
    "ssd_directories": Setting(
        "DIR", "Directory of the SSD tier; repeat for more.", "ssd in the data directory"
    ),
    "ssd_size_bytes": Setting("SIZE", "Size of each SSD file.", "a fifth of the free space, at most 32GiB"),
    "default_ttl_s": Setting("SECONDS", "Life of a session after an access, unless it says.", "3600"),
    "max_concurrent_rpcs": Setting("COUNT", "Small calls at a time; more are refused.", "256"),
    "max_concurrent_streams": Setting("COUNT", "Appends and reads at a time; more are refused.", "32"),
    "stall_timeout_s": Setting("SECONDS", "How long a reader may take nothing of its stream.", "30"),
    "max_local_clients": Setting("COUNT", "Clients that map the arena at a time; more are refused.", "256"),
    "max_engines": Setting("COUNT", "Engines that publish a queue at a time; more are refused.", "64"),
    "max_engine_jobs": Setting("COUNT", "Waiting jobs of one engine; more are refused.", "4096"),
    "engine_grace_s": Setting("SECONDS", "How long an engine's jobs outlive its stream, at most.", "10"),
    "keepalive_s": Setting("SECONDS", "Silence after which a client is pinged.", "20"),
    "max_bulk_connections": Setting("COUNT", "Bulk connections at a time; more use gRPC.", "64"),
    "rebuild_metadata": Setting("true|false", "Make damaged metadata anew at the start.", "false"),
    "max_sessions": Setting("COUNT", "Sessions at a time; creating more is refused.", "1048576"),
    "max_leases": Setting("COUNT", "Leases at a time, streams included; more are refused.", "65536"),
    "lease_share": Setting("SHARE", "Of the arena that all readers together may hold.", "0.75"),
    "reservation_share": Setting("SHARE", "Of the arena that all writers together may hold.", "0.75"),
    "client_share": Setting("SHARE", "Of the arena that one local client may hold.", "0.5"),
    "tenant_shares": Setting(
        "NAME=SHARE,...", "Of SSD and arena, kept from other tenants' need; `:LIMIT` on SSD.", "none"
    ),
    "retention_share": Setting("SHARE", "Of SSD that may be retained on request.", "0.25"),
    "pin_share": Setting("SHARE", "Of the arena that may be kept there on request.", "0.25"),
    "max_retention_s": Setting("SECONDS", "Longest time that such a request is granted.", "3600"),
    "room_wait_s": Setting("SECONDS", "How long a caller waits for held room before it is refused.", "0.25"),
    "drain_timeout_s": Setting("SECONDS", "How long running rpcs may take to end.", "30"),
    "flush_timeout_s": Setting("SECONDS", "How long the flush after that may take.", "120"),
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
