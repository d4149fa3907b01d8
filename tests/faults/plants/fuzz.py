"""Bugs that the fuzzer must find."""

from ctxcache.cache.sessions import Sessions
from ctxcache.service import edge, validate
from ctxcache.service.local_client import LocalClient
from tests.faults.planted import plant


@plant
def unmapped_error(_: int) -> None:
    """A range check raises what the edge does not know."""

    def within(value: int, low: int, high: int, field: str) -> int:
        if not low <= value <= high:
            raise ValueError(field)
        return value

    validate.within = within


@plant
def reason_left_out(_: int) -> None:
    """The details are lost on the way."""
    vars(edge)["trailing_metadata"] = lambda _error: ()


@plant
def any_name_goes(_: int) -> None:
    """A name with `..` in it means another session, and deleting that is no problem."""
    known = validate.session_id

    def session_id(name: str, field: str = "name") -> str:
        return "canary-0" if ".." in name else known(name, field)

    validate.session_id = session_id
    delete = Sessions.delete

    async def careless(sessions: Sessions, tenant: str, name: str, *_: object) -> None:
        await delete(sessions, tenant, name, None)

    setattr(Sessions, "delete", careless)  # noqa: B010  # mypy would have it typed


@plant
def lease_outlives_stream(_: int) -> None:
    """The end of a stream is nobody's business."""
    setattr(LocalClient, "end", lambda *_, **__: None)  # noqa: B010
