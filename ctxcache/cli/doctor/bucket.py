"""The bucket of a fleet: every condition that a fleet rests on, tried, with the time that each took."""

import asyncio
from collections.abc import Iterator

from ctxcache.cli.doctor import Finding, fatal, ok
from ctxcache.errors import InvalidConfiguration, Unavailable
from ctxcache.settings.config import Settings
from ctxcache.storage.bucket_probe import probe
from ctxcache.storage.register import open_register

ADVICE = "docs/fleet.md says which object stores honour conditions, and what to set"


def bucket(settings: Settings) -> Iterator[Finding]:
    """Try the bucket of `fleet_bucket`. Raises InvalidConfiguration where there is none."""
    if not settings.fleet_bucket:
        raise InvalidConfiguration(source="fleet_bucket", problem="is needed: it says which bucket to try")
    register = open_register(settings.fleet_bucket)
    for tried in asyncio.run(probe(register)):
        name = f"bucket: {tried.what}"
        if not tried.problem:
            yield ok(name, f"so it is, after {tried.seconds * 1000:.1f} ms", settings.fleet_bucket)
        elif tried.is_silent:
            error = Unavailable(target=settings.fleet_bucket, problem=tried.problem)
            yield fatal(name, error, "credentials, endpoint and network: see docs/fleet.md")
        else:
            yield fatal(name, InvalidConfiguration(source="fleet_bucket", problem=tried.problem), ADVICE)
