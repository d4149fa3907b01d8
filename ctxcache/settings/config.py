"""Configuration of the server: arguments over environment over TOML file over safe defaults.

Environment names are CTXCACHE_ and the knob's name in capitals; the TOML file has the same names. Unknown
names are errors. `limits_of` and `queue_limits_of` are the settings' bounds as the cache takes them.
"""

import difflib
import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from ctxcache.core.limits import Limits, QueueLimits, Watermarks
from ctxcache.core.placement.names import PolicyName
from ctxcache.core.placement.shares import Share, Shares
from ctxcache.errors import InvalidConfiguration
from ctxcache.identity import Rule, parse_rules
from ctxcache.settings.knobs import KNOBS
from ctxcache.settings.knobs.knob import parse_seconds, parse_size_bytes
from ctxcache.settings.knobs.places import SIZE_LIMIT_BYTES
from ctxcache.settings.words import plain_words
from ctxcache.wire.address import Address

GIB = 1 << 30
MIB = 1 << 20
ARENA_CAP_BYTES = 8 * GIB
SSD_LEAST_BYTES = 64 << 10
SSD_CAP_BYTES = 32 * GIB
PREFIX = "CTXCACHE_"
Source = Literal["option", "environment", "file", "default"]
OTHERS = (
    *("CONFIG", "TARGET", "MALLOC", "TOKEN_FILE"),
    *("TLS_CA", "TLS_CLIENT_CERTIFICATE", "TLS_CLIENT_KEY", "TLS_SERVER_NAME"),
)
"""Other variables with the same prefix, for clients and commands."""


def parse_size(value: object) -> object:
    """The bytes of a text such as `512MiB`; anything else as it is. Raises ValueError."""
    return parse_size_bytes(value) if isinstance(value, str) else value


def parse_time(value: object) -> object:
    """The seconds of a text such as `30d`; anything else as it is. Raises ValueError."""
    return parse_seconds(value) if isinstance(value, str) else value


def split_paths(value: object) -> object:
    """`/a:/b`, as the environment writes a list of paths."""
    return tuple(filter(None, value.split(os.pathsep))) if isinstance(value, str) else value


def parse_tenant_shares(value: object) -> object:
    """`a=0.5,b=0.2:0.4` or a table: the share of each tenant and, unless it is 1, the limit.

    Raises ValueError.
    """
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


def check_address(value: str) -> str:
    """The same text, which is empty, `auto` or `host:port`. Raises ValueError."""
    if value not in ("", "auto"):
        Address.of(value)
    return value


def check_own_address(value: str) -> str:
    """The same text, which is empty or `host:port`. Raises ValueError."""
    if value:
        Address.of(value)
    return value


Size = Annotated[int, BeforeValidator(parse_size), Field(ge=0, le=SIZE_LIMIT_BYTES)]
Seconds = Annotated[float, BeforeValidator(parse_time)]
TenantShares = Annotated[dict[str, Share], NoDecode, BeforeValidator(parse_tenant_shares)]
Identities = Annotated[tuple[Rule, ...], NoDecode, BeforeValidator(parse_rules)]
OwnAddress = Annotated[str, AfterValidator(check_own_address)]
SideAddress = Annotated[str, AfterValidator(check_address)]
Paths = Annotated[tuple[Path, ...], NoDecode, BeforeValidator(split_paths)]


def default_data_directory() -> Path:
    """The user's state directory for ctxcache."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "ctxcache"


def _knob(name: str) -> Any:
    knob = KNOBS[name]
    bounds: dict[str, Any] = {**knob.bounds}
    return Field(default=knob.default, description=knob.help, **bounds)


class Settings(BaseSettings):
    """Every knob of `ctxcache serve`; `knobs` says what each means, its default and its bounds."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )

    data_directory: Path = Field(default_factory=default_data_directory)
    arena_directory: Path = _knob("arena_directory")
    arena_size_bytes: Size = _knob("arena_size_bytes")
    arena_huge_pages: Literal["auto", "on", "off"] = _knob("arena_huge_pages")
    arena_prefault: bool = _knob("arena_prefault")
    arena_sealed: bool = _knob("arena_sealed")
    ssd_directories: Paths = _knob("ssd_directories")
    ssd_missing: Literal["refuse", "serve"] = _knob("ssd_missing")
    ssd_copies: int = _knob("ssd_copies")
    ssd_hang_after_s: Seconds = _knob("ssd_hang_after_s")
    ssd_size_bytes: Size = _knob("ssd_size_bytes")
    listen: OwnAddress = _knob("listen")
    unix_socket: str = _knob("unix_socket")
    control_socket: str = _knob("control_socket")
    tls_certificate: Path | None = _knob("tls_certificate")
    tls_key: Path | None = _knob("tls_key")
    tls_client_ca: Path | None = _knob("tls_client_ca")
    identities: Identities = _knob("identities")
    token_hashes: Path | None = _knob("token_hashes")
    insecure_listen: bool = _knob("insecure_listen")
    bulk_listen: SideAddress = _knob("bulk_listen")
    metrics_listen: SideAddress = _knob("metrics_listen")
    metrics_tls_certificate: Path | None = _knob("metrics_tls_certificate")
    metrics_tls_key: Path | None = _knob("metrics_tls_key")
    metrics_token_file: Path | None = _knob("metrics_token_file")
    status_names: Literal["auto", "on", "off"] = _knob("status_names")
    max_concurrent_rpcs: int = _knob("max_concurrent_rpcs")
    max_concurrent_streams: int = _knob("max_concurrent_streams")
    stall_timeout_s: Seconds = _knob("stall_timeout_s")
    max_local_clients: int = _knob("max_local_clients")
    keepalive_s: Seconds = _knob("keepalive_s")
    max_connections: int = _knob("max_connections")
    max_connections_per_host: int = _knob("max_connections_per_host")
    max_bulk_connections: int = _knob("max_bulk_connections")
    fleet_bucket: str = _knob("fleet_bucket")
    fleet_secret_file: Path | None = _knob("fleet_secret_file")
    fleet_address: OwnAddress = _knob("fleet_address")
    fleet_server_name: str = _knob("fleet_server_name")
    fleet_token_file: Path | None = _knob("fleet_token_file")
    fleet_patience_s: Seconds = _knob("fleet_patience_s")
    fleet_beat_s: Seconds = _knob("fleet_beat_s")
    fleet_share: Literal["asked", "all", "worth"] = _knob("fleet_share")
    fleet_share_bytes_per_s: Size = _knob("fleet_share_bytes_per_s")
    fleet_prefixes: bool = _knob("fleet_prefixes")
    dram_low_watermark: float = _knob("dram_low_watermark")
    dram_high_watermark: float = _knob("dram_high_watermark")
    dirty_watermark: float = _knob("dirty_watermark")
    dirty_limit: float = _knob("dirty_limit")
    tail_age_s: Seconds = _knob("tail_age_s")
    write_behind_bytes_per_s: Size = _knob("write_behind_bytes_per_s")
    scrub_bytes_per_s: Size = _knob("scrub_bytes_per_s")
    placement_policy: PolicyName = _knob("placement_policy")
    placement_objective: Literal["turns", "tokens", "seconds"] = _knob("placement_objective")
    prefill_tokens_per_s: int = _knob("prefill_tokens_per_s")
    engine_cents_per_hour: int = _knob("engine_cents_per_hour")
    write_cents_per_tb: int = _knob("write_cents_per_tb")
    default_ttl_s: Seconds = _knob("default_ttl_s")
    tenant_shares: TenantShares = _knob("tenant_shares")
    retention_share: float = _knob("retention_share")
    pin_share: float = _knob("pin_share")
    max_retention_s: Seconds = _knob("max_retention_s")
    max_engines: int = _knob("max_engines")
    max_engine_jobs: int = _knob("max_engine_jobs")
    engine_grace_s: Seconds = _knob("engine_grace_s")
    max_sessions: int = _knob("max_sessions")
    max_leases: int = _knob("max_leases")
    lease_share: float = _knob("lease_share")
    reservation_share: float = _knob("reservation_share")
    client_share: float = _knob("client_share")
    room_wait_s: Seconds = _knob("room_wait_s")
    rebuild_metadata: bool = _knob("rebuild_metadata")
    drain_timeout_s: Seconds = _knob("drain_timeout_s")
    flush_timeout_s: Seconds = _knob("flush_timeout_s")
    trace_endpoint: str = _knob("trace_endpoint")
    trace_ratio: float = _knob("trace_ratio")
    fault_injection: bool = _knob("fault_injection")
    log_level: Literal["debug", "info", "warning", "error"] = _knob("log_level")
    log_format: Literal["text", "json"] = _knob("log_format")

    @field_validator("ssd_size_bytes")
    @classmethod
    def _has_room(cls, value: int) -> int:
        if 0 < value < SSD_LEAST_BYTES:
            raise ValueError(
                f"{value} B is too small for a tier: at least {SSD_LEAST_BYTES} B, or 0 for automatic"
            )
        return value

    # The lower mark is declared before the upper one: a validator sees only the fields before its own.
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


def differing(settings: Settings) -> dict[str, str]:
    """Settings that are not at their default, as text. Rules are counted."""
    shown_values = {}
    for name, value in json.loads(settings.model_dump_json()).items():
        if getattr(settings, name) != KNOBS[name].default:
            shown = f"{len(value)} rules" if name == "identities" else value
            shown_values[name] = shown if isinstance(shown, str) else json.dumps(shown)
    return shown_values


def load(arguments: dict[str, Any], *, file: Path | None = None) -> Settings:
    """Settings from arguments that are not None, the environment and a TOML file.

    Raises InvalidConfiguration.
    """
    return load_with_sources(arguments, file=file)[0]


# The order of sources, and the way of pydantic by which each value comes:
#
#     option ──────► init       above      environment ──► env
#     file ────────► init, but only names that the environment does not have, which is above it
#     default ─────► field
def load_with_sources(
    arguments: dict[str, Any], *, file: Path | None = None
) -> tuple[Settings, dict[str, Source]]:
    """Settings as `load` has them, and where each comes from. Raises InvalidConfiguration."""
    given = {name: value for name, value in arguments.items() if value is not None}
    # pydantic would ignore a misspelt name, and the server would run with unintended settings.
    known = {knob.variable for knob in KNOBS.values()} | {PREFIX + name for name in OTHERS}
    if stray := {name for name in os.environ if name.upper().startswith(PREFIX)} - _as_spelt(known):
        raise InvalidConfiguration(source="environment", problem=f"unknown name {min(stray)}")
    in_file = _file(file) if file else {}
    below = {name: value for name, value in in_file.items() if not _is_in_environment(name)}
    try:
        settings = Settings(**{**below, **given})
    except ValidationError as error:
        # One error is enough: whoever mends it sees the next.
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        problem = _unknown(field) if first["type"] == "extra_forbidden" else first["msg"]
        raise InvalidConfiguration(source=field or "configuration", problem=plain_words(problem)) from error
    return settings, {name: _source(name, given, below) for name in KNOBS}


def _source(name: str, given: Mapping[str, Any], below: Mapping[str, Any]) -> Source:
    if name in given:
        return "option"
    if _is_in_environment(name):
        return "environment"
    return "file" if name in below else "default"


def _is_in_environment(name: str) -> bool:
    return bool(_as_spelt({f"{PREFIX}{name.upper()}"}))


def _as_spelt(variables: set[str]) -> set[str]:
    """Variables of the environment that spell one of these names in any case, as pydantic reads them."""
    return {name for name in os.environ if name.upper() in variables}


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, KNOBS, n=1)
    return f"is not a setting; did you mean {near[0]}?" if near else "is not a setting"


def _file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as handle:
            return tomllib.load(handle)
    except OSError as error:
        raise InvalidConfiguration(source=str(path), problem=error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise InvalidConfiguration(source=str(path), problem=f"is not TOML: {error}") from error


def limits_of(settings: Settings, *, are_divided: bool) -> Limits:
    """Limits of everything but queues. `are_divided`: no tenant may take all of a count."""
    return Limits(
        session_count=settings.max_sessions,
        lease_count=settings.max_leases,
        lease_share=settings.lease_share,
        reservation_share=settings.reservation_share,
        client_share=settings.client_share,
        retention_share=settings.retention_share,
        pin_share=settings.pin_share,
        retention_ns=int(settings.max_retention_s * 10**9),
        room_wait_ns=int(settings.room_wait_s * 10**9),
        scrub_bytes_per_s=settings.scrub_bytes_per_s,
        are_divided=are_divided,
    )


def queue_limits_of(settings: Settings, *, are_divided: bool) -> QueueLimits:
    """Limits of engines' queues."""
    return QueueLimits(
        engine_count=settings.max_engines,
        job_count=settings.max_engine_jobs,
        grace_ns=int(settings.engine_grace_s * 10**9),
        are_divided=are_divided,
    )


def watermarks_of(settings: Settings) -> Watermarks:
    """Watermarks of the arena."""
    return Watermarks(
        low=settings.dram_low_watermark,
        high=settings.dram_high_watermark,
        dirty=settings.dirty_watermark,
        dirty_limit=settings.dirty_limit,
        tail_age_ns=int(settings.tail_age_s * 10**9),
        write_behind_bytes_per_s=settings.write_behind_bytes_per_s,
    )
