"""Bugs that the soak must find, and a shorter grace for those who cannot wait."""

from typing import Any

from ctxcache.cache import appends
from ctxcache.cache.leases import Leases
from ctxcache.service.local_client import LocalClient
from tests.faults.planted import plant


@plant
def grace_s(seconds: int) -> None:
    """No bug: slots of a writer that disappeared are kept from others for so long."""
    appends.GRACE_NS = seconds * 10**9


@plant
def lease_kept_on_cancel(_: int) -> None:
    """One lease in ten is not let go; its deadline never comes."""
    release, count = Leases.release, [0]

    def forgetful(reading: Leases, lease_id: int) -> None:
        count[0] += 1
        if count[0] % 10:
            release(reading, lease_id)

    setattr(Leases, "release", forgetful)  # noqa: B010  # mypy would have it typed


@plant
def lease_kept_on_release(_: int) -> None:
    """One lease in ten that a local reader gives back is kept until its deadline."""
    release, count = LocalClient._release_lease, [0]

    def forgetful(client: LocalClient, lease_id: int) -> None:
        count[0] += 1
        if count[0] % 10:
            release(client, lease_id)

    setattr(LocalClient, "_release_lease", forgetful)  # noqa: B010


@plant
def reads_remembered(_: int) -> None:
    """Each reader is written down for ever, at length."""
    known: dict[int, bytes] = {}
    begin = Leases._begin_plan

    def remembering(reading: Leases, asked: Any) -> Any:
        known[len(known)] = bytes(1) * (256 << 10)
        return begin(reading, asked)

    setattr(Leases, "_begin_plan", remembering)  # noqa: B010
