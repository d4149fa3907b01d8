"""Whose sessions an rpc is about. The tenant comes from the connection's credentials, never from a request field."""

from ctxcache.service.caller import current
from ctxcache.service.rpc import Context


def tenant_of(context: Context) -> str:
    """The tenant of the rpc that runs in this task."""
    del context
    return current().tenant
