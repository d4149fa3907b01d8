"""A fleet as settings describe it: what is missing is refused, in words, before anything is opened."""

from pathlib import Path

from ctxcache.client.credentials import ClientTls, OwnTokenFile
from ctxcache.core.fleet.heads import Secret
from ctxcache.core.fleet.register import Register
from ctxcache.core.savings import CENTS
from ctxcache.errors import InvalidConfiguration
from ctxcache.fleet.sharing import Price
from ctxcache.runtime.files import check_secret, secret_refusal
from ctxcache.settings.config import Settings
from ctxcache.storage.register import open_register
from ctxcache.wire.address import Address


def check_fleet(settings: Settings) -> None:
    """Raise InvalidConfiguration for a fleet that cannot be opened. The bucket is not asked."""
    if not settings.fleet_bucket:
        for name in ("fleet_secret_file", "fleet_token_file", "fleet_address", "fleet_server_name"):
            if getattr(settings, name):
                raise InvalidConfiguration(source=name, problem="needs fleet_bucket beside it")
        return
    register_of(settings)
    secret_of(settings)
    credentials_of(settings)
    price_of(settings)
    own_address(settings, settings.listen)


def register_of(settings: Settings) -> Register:
    """The bucket. Raises InvalidConfiguration."""
    return open_register(settings.fleet_bucket, patience_s=settings.fleet_patience_s)


def secret_of(settings: Settings) -> Secret:
    """The fleet's secret. Raises InvalidConfiguration."""
    path = settings.fleet_secret_file
    if path is None:
        raise InvalidConfiguration(source="fleet_secret_file", problem="is needed beside fleet_bucket")
    refusal = secret_refusal("fleet_secret_file", path)
    try:
        check_secret(path, refusal)
        return Secret(path.read_bytes().strip())
    except OSError as error:
        raise refusal(error.strerror or str(error)) from error
    except ValueError as error:
        raise refusal(str(error)) from error


def price_of(settings: Settings) -> Price | None:
    """By what sessions are shared that nobody asked for; None for no price. Raises InvalidConfiguration."""
    if settings.fleet_share != "worth":
        return None
    if not settings.engine_cents_per_hour:
        problem = "is needed beside fleet_share = worth: what computing costs is compared with the bucket"
        raise InvalidConfiguration(source="engine_cents_per_hour", problem=problem)
    return Price(settings.prefill_tokens_per_s, settings.engine_cents_per_hour / CENTS)


def credentials_of(settings: Settings) -> tuple[ClientTls | None, OwnTokenFile | None]:
    """What this store shows to others. Raises InvalidConfiguration."""
    tls = None
    name = settings.fleet_server_name or None
    if settings.tls_certificate is not None:
        # Others' certificates are of the authority that signs callers', or of one that the system trusts.
        tls = ClientTls(settings.tls_client_ca, settings.tls_certificate, settings.tls_key, name)
        tls.context()
    elif name:
        raise InvalidConfiguration(source="fleet_server_name", problem="needs tls_certificate beside it")
    token = settings.fleet_token_file
    return tls, None if token is None else OwnTokenFile(_there(token))


def own_address(settings: Settings, listened: str) -> str:
    """Where other stores reach this one; `listened`: the address that it listens at.

    Raises InvalidConfiguration.
    """
    address = settings.fleet_address or listened
    if not address:
        problem = "is needed: the store listens at no TCP port"
        raise InvalidConfiguration(source="fleet_address", problem=problem)
    if Address.of(address).host in ("0.0.0.0", "::"):  # noqa: S104  what is refused
        problem = f"is needed: {address} says on which port others reach this store, and not on which host"
        raise InvalidConfiguration(source="fleet_address", problem=problem)
    if not settings.bulk_listen:
        problem = "off, and rows of a fleet come over it: leave it at auto"
        raise InvalidConfiguration(source="bulk_listen", problem=problem)
    return address


def _there(path: Path) -> Path:
    if not path.is_file():
        raise InvalidConfiguration(source="fleet_token_file", problem=f"{path} is not there")
    return path
