"""The guard at the edge: who calls, and whether that one may call this. Before anything of the request is looked at."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Protocol

from ctxcache.errors import CacheError
from ctxcache.runtime import spans
from ctxcache.service import caller as callers
from ctxcache.service.audit import OPERATORS_ONLY, Refusals
from ctxcache.service.caller import ANYBODY, TENANT_HEADER, Caller
from ctxcache.service.identification import Identification

AUTHORIZATION = "authorization"
FOR_OTHERS = frozenset(
    f"/ctxcache.v1.{service}/{method}"
    for service, methods in {
        "SessionService": (
            "GetSession", "ListSessions", "UpdateSession", "TruncateSession", "ForkSession", "FlushSession",
            "DeleteSession",
        ),
        "ModelService": ("GetModel", "ListModels"),
        "HintService": ("Hint",),
        "AdminService": ("DemoteSession", "EvictSession", "DeleteModel"),
    }.items()
    for method in methods
)  # fmt: skip
"""What an operator may do for another tenant: nothing that shows rows, and nothing that begins a tenant."""


class Connected(Protocol):
    """What is asked of an rpc's context."""

    def peer(self) -> str:
        """Address of the other end."""

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        """What the transport proved of it."""

    def invocation_metadata(self) -> Any:
        """What it says of itself."""


class Guard:
    """Lets callers in, one rpc at a time."""

    def __init__(self, identification: Identification) -> None:
        self._identification = identification
        self._refusals = Refusals()

    def let_in(self, context: Connected, method: str) -> Caller:
        """Make whoever calls the caller of this task. Raises Unauthenticated, PermissionDenied."""
        try:
            caller = ANYBODY if self._identification.is_open else self._find(context)
            if method.startswith(OPERATORS_ONLY):
                caller.check_operator(method.rpartition("/")[2])
            if method in FOR_OTHERS:
                caller = _of_tenant(caller, context)
        except CacheError as error:
            self._refusals.note(error, peer=context.peer(), method=method)
            raise
        callers.let_in(caller)
        spans.named_by(partial(_trace_parent, context))
        return caller

    def _find(self, context: Connected) -> Caller:
        # Asked of each rpc anew, which takes microseconds: an address may be another's by now.
        given: list[str] = []
        if self._identification.has_tokens:
            metadata = context.invocation_metadata() or ()
            given = [str(value) for key, value in metadata if key == AUTHORIZATION]
        return self._identification.of_rpc(context.peer(), context.auth_context(), given)


def _trace_parent(context: Connected) -> str:
    metadata = context.invocation_metadata() or ()
    return next((str(value) for key, value in metadata if key == spans.HEADER), "")


def _of_tenant(caller: Caller, context: Connected) -> Caller:
    for key, value in context.invocation_metadata() or ():
        if key == TENANT_HEADER:
            return caller.acting_for(str(value))
    return caller
