"""The checks of a start: `serve` and `ctxcache doctor` run the same ones before anything is opened.

Each check calls the functions with which the parts refuse themselves, and changes nothing. Worst case: what
was looked at changes before it is opened; the part then refuses itself, in the same words.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ctxcache.fleet.opening import check_fleet
from ctxcache.observe.bearer import Bearer
from ctxcache.observe.tracing import check_installed
from ctxcache.runtime.memory import check_address_space
from ctxcache.server.listening import check_addresses, check_exposure
from ctxcache.service.callers import identified_by
from ctxcache.service.tls import load_tls
from ctxcache.settings.config import Settings
from ctxcache.storage.opening import (
    check_arena,
    check_copies,
    check_data_directory,
    check_ssd_directories,
)


@dataclass(frozen=True, slots=True)
class Check:
    """A check of a start: `run` raises a CacheError for what makes the start impossible.

    `well` says what is so where it does not, `advice` what to do where it does. `is_held`: a server that runs
    by these settings has what is looked for, so that it is not free and need not be.
    """

    subject: str
    run: Callable[[Settings], None]
    well: str
    advice: str
    is_held: bool = False


def check_secrets(settings: Settings) -> None:
    """Raise InvalidConfiguration for a certificate, key or file of tokens that cannot be used."""
    load_tls(settings.tls_certificate, settings.tls_key, settings.tls_client_ca)
    load_tls(settings.metrics_tls_certificate, settings.metrics_tls_key, None, prefix="metrics_")
    identified_by(settings.identities, settings.token_hashes)
    if settings.metrics_token_file is not None:
        Bearer(settings.metrics_token_file, source="metrics_token_file")


# Addresses come last: the default sockets lie in the data directory, whose own refusal says more.
CHECKS = (
    Check(
        "address space",
        lambda settings: check_address_space(settings.arena_size_bytes),
        "no bound that leaves too little",
        "lift the bound (ulimit -v), or choose a smaller --arena-size-bytes",
    ),
    Check(
        "exposure",
        check_exposure,
        "loopback, with TLS, or so on purpose",
        "docs/security.md says how to make certificates",
    ),
    Check(
        "TLS and tokens",
        check_secrets,
        "every file that is named can be used",
        "name files that this user may read and others may not: chmod 600, in a pod defaultMode 0440",
    ),
    Check(
        "fleet",
        check_fleet,
        "alone, or everything is named that a fleet needs",
        "docs/fleet.md has the settings of a fleet; `ctxcache doctor bucket` tries the bucket",
    ),
    Check(
        "tracing",
        lambda settings: check_installed() if settings.trace_endpoint else None,
        "off, or installed",
        "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-grpc, or leave out --trace-endpoint",
    ),
    Check(
        "copies",
        check_copies,
        "an SSD directory for each",
        "name more with --ssd-directories, or lower --ssd-copies",
    ),
    Check(
        "data directory",
        check_data_directory,
        "it can be opened, or made",
        "docs/operations.md says what this failure means; --data-directory names another",
        is_held=True,
    ),
    Check(
        "arena",
        check_arena,
        "it fits",
        "choose a smaller --arena-size-bytes, a tmpfs with --arena-directory, or enlarge it"
        " (containers: --shm-size)",
        is_held=True,
    ),
    Check(
        "SSD files",
        check_ssd_directories,
        "each can be opened, or made in full",
        "choose a smaller --ssd-size-bytes, other --ssd-directories, or make room",
        is_held=True,
    ),
    Check(
        "addresses",
        check_addresses,
        "each can be listened on",
        "choose others with --listen, --unix-socket, --control-socket, --bulk-listen, --metrics-listen",
        is_held=True,
    ),
)


def check_start(settings: Settings) -> None:
    """Raise for the first thing that makes a start impossible. Changes nothing.

    Raises as `Server.start` does.
    """
    for check in CHECKS:
        check.run(settings)


def checks_beside(*, is_running: bool) -> Iterator[Check]:
    """The checks that mean something while a server runs by the same settings, or while none does."""
    return (check for check in CHECKS if not (is_running and check.is_held))
