"""Names that a shell completes, asked of the server. Worst case.

It does not answer within a second, and nothing is offered.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

import typer

from ctxcache.cli.call import CliCall
from ctxcache.cli.options import Credentials
from ctxcache.errors import CacheError

if TYPE_CHECKING:
    from ctxcache.client import Client

TIMEOUT_S = 1.0
LIMIT = 200
"""Names that are looked at."""


def session_names(context: typer.Context, incomplete: str) -> list[str]:
    """IDs of sessions."""
    return _matching(context, incomplete, lambda client: (_id(s.name) for s in client.sessions.list()))


def model_names(context: typer.Context, incomplete: str) -> list[str]:
    """IDs of models."""
    return _matching(context, incomplete, lambda client: (_id(m.name) for m in client.models.list()))


def tenant_names(context: typer.Context, incomplete: str) -> list[str]:
    """Tenants."""
    return _matching(context, incomplete, lambda client: (t.tenant for t in client.admin.list_tenants()))


def ssd_paths(context: typer.Context, incomplete: str) -> list[str]:
    """SSD files."""
    return _matching(context, incomplete, _paths)


def _paths(client: "Client") -> Iterator[str]:
    return (tier.path for tier in client.admin.stats().tiers[1:])


def _matching(
    context: typer.Context, incomplete: str, names: "Callable[[Client], Iterable[str]]"
) -> list[str]:
    given = context.find_root().params
    # Their variables, where options are not given, are among the parameters.
    names_of = ("token_file", "tls_ca", "tls_client_certificate", "tls_client_key")
    call = CliCall(credentials=Credentials(*map(given.get, names_of)), timeout_s=TIMEOUT_S)
    target = given.get("target") or os.environ.get("CTXCACHE_TARGET")
    try:
        with call.but(target, None, None).client() as client:
            found = list(islice(names(client), LIMIT))
    except CacheError:
        return []
    return [name for name in found if name.startswith(incomplete)]


def _id(name: str) -> str:
    return name.partition("/")[2]
