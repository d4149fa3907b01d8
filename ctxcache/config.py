"""Configuration of the server: arguments over environment over TOML file over safe defaults.

Environment names are CTXCACHE_ and the knob's name in capitals; the TOML file has the same names.
Unknown names are errors.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from ctxcache.core.placement.shares import Share, Shares
from ctxcache.errors import InvalidConfiguration

GIB = 1 << 30
MIB = 1 << 20
ARENA_CAP_BYTES = 8 * GIB
SSD_CAP_BYTES = 32 * GIB
SIZE_LIMIT_BYTES = 1 << 60
"""More than any device has, and few enough for every sum of sizes."""
DAY_S = 86400
PREFIX = "CTXCACHE_"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?", re.IGNORECASE)
_UNITS = {"": 1, "B": 1} | {
    f"{u}{i}B": (1024 if i else 1000) ** n for n, u in enumerate("KMGT", 1) for i in ("I", "")
}


def parse_size(value: object) -> object:
    """`512MiB`, `8 GiB`, `1.5GB` or a number of bytes. Raises ValueError."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    if not match:
        raise ValueError(f"{value!r} is not a size such as 512MiB or 8GiB")
    return int(Decimal(match[1]) * _UNITS[(match[2] or "").upper()])


def split_paths(value: object) -> object:
    """`/a:/b`, as the environment writes a list of paths."""
    return tuple(filter(None, value.split(os.pathsep))) if isinstance(value, str) else value


def parse_tenant_shares(value: object) -> object:
    """`a=0.5,b=0.2:0.4` or a table: of each tenant the share and, unless that is 1, the limit. Raises ValueError."""
    if isinstance(value, str):
        parts = [part.split("=") for part in value.split(",") if part.strip()]
        if not all(len(part) == 2 for part in parts):  # a name and a share
            raise ValueError(f"{value!r} is not a list such as a=0.5,b=0.2:0.4")
        if len({name.strip() for name, _ in parts}) < len(parts):
            raise ValueError(f"{value!r} names a tenant twice")
        value = {name.strip(): text for name, text in parts}
    if not isinstance(value, Mapping):
        return value
    shares = {name: _share(name, given) for name, given in value.items()}
    Shares(shares)
    return shares


def _share(name: str, given: object) -> Share:
    if isinstance(given, Share):
        return given
    fields = given if isinstance(given, Mapping) else None
    if isinstance(given, str):
        parts = given.split(":")
        fields = dict(zip(("share", "limit"), parts, strict=False)) if len(parts) <= 2 else None
    elif isinstance(given, (int, float)):
        fields = {"share": given}
    if not fields or set(fields) - {"share", "limit"}:
        raise ValueError(f"{name}: {given!r} is neither a share nor a share and a limit")
    try:
        return Share(float(fields.get("share", 0)), float(fields.get("limit", 1)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from error


Size = Annotated[int, BeforeValidator(parse_size), Field(ge=0, le=SIZE_LIMIT_BYTES)]
TenantShares = Annotated[dict[str, Share], NoDecode, BeforeValidator(parse_tenant_shares)]
Paths = Annotated[tuple[Path, ...], NoDecode, BeforeValidator(split_paths)]


def default_data_directory() -> Path:
    """The user's state directory for ctxcache."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "ctxcache"


class Settings(BaseSettings):
    """Every knob of `ctxcache serve`, with unit and default."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )

    data_directory: Path = Field(default_factory=default_data_directory)
    """Where metadata and, unless `ssd_directories` says otherwise, SSD files lie."""
    listen: str = "127.0.0.1:7420"
    """TCP address, `host:port`; port 0 takes a free one; empty for none."""
    unix_socket: str = "auto"
    """Path of the Unix socket; `auto` for `ctxcache.sock` in the data directory; empty for none."""
    control_socket: str = "auto"
    """Path of local clients' socket; `auto` for `control.sock` in the data directory; empty for none."""
    tls_certificate: Path | None = None
    """PEM file with the TCP ports' certificate and its chain; none: no TLS."""
    tls_key: Path | None = None
    """PEM file with its key."""
    tls_client_ca: Path | None = None
    """PEM file with the authorities of clients' certificates; none: clients need no certificate."""
    insecure_listen: bool = False
    """Listen off loopback without TLS: whoever reaches the port may do everything."""
    bulk_listen: str = "auto"
    """Where the bulk channel listens: `auto` beside the gRPC addresses, on a free port; or `host:port`; empty for none."""
    arena_directory: Path = Path("/dev/shm")  # noqa: S108  # shared memory is what it is for
    """Where the DRAM arena's file lies: a tmpfs that clients can reach."""
    arena_size_bytes: Size = 0
    """Size of the arena. 0: a quarter of the memory available, at most 8 GiB."""
    arena_huge_pages: Literal["auto", "on", "off"] = "auto"
    """Whether the arena is made of reserved 2 MiB pages: `auto` where the kernel's pool has enough."""
    arena_prefault: bool = True
    """Whether the arena's pages are touched ahead of use, in the background."""
    dram_low_watermark: float = Field(default=1 / 16, ge=0, lt=1)
    """Share of the arena: when less is free, clean segments leave memory."""
    dram_high_watermark: float = Field(default=1 / 8, ge=0, lt=1)
    """Share of the arena: when as much is free again, no more of them leave."""
    dirty_watermark: float = Field(default=0.25, ge=0, le=1)
    """Share of the arena: when more of it is not on SSD, the oldest is written at once, growing segments too."""
    dirty_limit: float = Field(default=0.75, gt=0, le=1)
    """Share of the arena: more is never without a copy on SSD; writers wait, and are then refused."""
    tail_age_s: float = Field(default=30, ge=0, le=DAY_S)
    """Age after which tokens in a growing segment are written behind. 0: never because of their age."""
    write_behind_bytes_per_s: Size = 0
    """Most bytes per second that are written though nobody waits for them. 0: no bound."""
    placement_policy: Literal["lru", "fifo", "t-lru", "look-ahead", "value"] = "value"
    """Which sessions leave memory and SSD when others need the room, and which are promoted ahead of need."""
    ssd_directories: Paths = ()
    """Directories of the SSD tier, one per device, separated by `:`. Empty: `ssd` in the data directory."""
    ssd_size_bytes: Size = 0
    """Size of the preallocated file in each. 0: a fifth of the free space, at most 32 GiB; what is there on restart."""
    default_ttl_s: float = Field(default=3600, ge=1, le=3650 * DAY_S)
    """Time a session lives on after an access when its creator does not say."""
    max_concurrent_rpcs: int = Field(default=256, ge=1)
    """Small calls at a time; more are refused with a retry delay."""
    max_concurrent_streams: int = Field(default=32, ge=1)
    """Appends and reads over gRPC at a time; more are refused with a retry delay."""
    stall_timeout_s: float = Field(default=30, gt=0, le=DAY_S)
    """How long a reader may take nothing of a stream before it is cut off."""
    max_local_clients: int = Field(default=256, ge=1)
    """Clients that map the arena at a time; more are refused with a retry delay."""
    max_engines: int = Field(default=64, ge=1, le=4096)
    """Engines that publish their waiting queue at a time, those that lost their stream included; more are refused."""
    max_engine_jobs: int = Field(default=4096, ge=1, le=1 << 16)
    """Waiting jobs that one engine may publish; what goes beyond is refused."""
    engine_grace_s: float = Field(default=10, ge=0, le=3600)
    """How long an engine's jobs stay when its stream breaks: the most that it is granted, and the default."""
    keepalive_s: float = Field(default=20, ge=1, le=3600)
    """Silence after which a client is pinged; one that does not answer for half as long again is given up."""
    max_bulk_connections: int = Field(default=64, ge=1, le=1024)
    """Connections to the bulk channel at a time, a thread each; more are closed, and use gRPC."""
    rebuild_metadata: bool = False
    """Make metadata that cannot be trusted anew at the start, as `ctxcache rebuild` does, instead of refusing it."""
    max_sessions: int = Field(default=1 << 20, ge=1)
    """Sessions at a time; creating more is refused."""
    max_leases: int = Field(default=1 << 16, ge=1)
    """Leases at a time, those of streams included; more are refused with a retry delay."""
    lease_share: float = Field(default=0.75, gt=0, le=1)
    """Share of the arena that all readers together may keep from being evicted."""
    reservation_share: float = Field(default=0.75, gt=0, le=1)
    """Share of the arena that all writers together may keep from being evicted."""
    client_share: float = Field(default=0.5, gt=0, le=1)
    """Share of the arena that one local client may keep so, by leases and again by reservations."""
    tenant_shares: TenantShares = {}
    """Of the SSD tier and of the arena, by tenant: the share that others' need does not touch, and the limit on SSD."""
    retention_share: float = Field(default=0.25, ge=0, le=1)
    """Share of the SSD tier that may be retained on clients' request, divided by the tenants' shares."""
    pin_share: float = Field(default=0.25, ge=0, le=1)
    """Share of the arena that may be kept there on clients' request, divided as above."""
    max_retention_s: float = Field(default=3600, ge=0, le=365 * DAY_S)
    """Longest time that clients may ask something to be retained, or kept in the arena."""
    room_wait_s: float = Field(default=0.25, ge=0, le=DAY_S)
    """How long a caller waits for others to let go of the arena before it is refused with a retry delay."""
    drain_timeout_s: float = Field(default=30, ge=0, le=DAY_S)
    """How long running rpcs may take to end on shutdown."""
    flush_timeout_s: float = Field(default=120, ge=0, le=DAY_S)
    """How long what is not on disk may take to get there after that; then the process ends without it."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe events that are logged, to stderr."""

    @field_validator("dram_high_watermark", "dirty_limit")
    @classmethod
    def _is_above(cls, value: float, info: ValidationInfo) -> float:
        below = {"dram_high_watermark": "dram_low_watermark", "dirty_limit": "dirty_watermark"}[
            str(info.field_name)
        ]
        if below in info.data and value < info.data[below]:
            raise ValueError(f"{value:g} is below {below}, {info.data[below]:g}")
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments, then environment; `load` puts the file below both."""
        return init_settings, env_settings


def load(arguments: dict[str, Any], *, file: Path | None = None) -> Settings:
    """Settings from arguments that are not None, the environment and a TOML file. Raises InvalidConfiguration."""
    given = {name: value for name, value in arguments.items() if value is not None}
    known = set(Settings.model_fields)
    stray = {name for name in os.environ if name.startswith(PREFIX)} - {PREFIX + n.upper() for n in known}
    if stray - {"CTXCACHE_CONFIG", "CTXCACHE_TARGET", "CTXCACHE_MALLOC"}:
        raise InvalidConfiguration(source="environment", problem=f"unknown name {min(stray)}")
    below = {n: v for n, v in _file(file).items() if PREFIX + n.upper() not in os.environ} if file else {}
    try:
        return Settings(**{**below, **given})
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        problem = "is not a setting" if first["type"] == "extra_forbidden" else first["msg"]
        raise InvalidConfiguration(
            source=field or "configuration", problem=problem.removeprefix("Value error, ")
        ) from error


def _file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as handle:
            return tomllib.load(handle)
    except OSError as error:
        raise InvalidConfiguration(source=str(path), problem=error.strerror or str(error)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidConfiguration(source=str(path), problem=f"is not TOML: {error}") from error
