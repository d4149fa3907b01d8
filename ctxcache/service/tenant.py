"""Who is calling. The tenant comes from the connection's credentials, never from a request field."""

from ctxcache.service.edge import Context

DEFAULT_TENANT = "default"


def tenant_of(context: Context) -> str:
    """The caller's tenant. Without authentication configured, everyone is the same one."""
    del context
    return DEFAULT_TENANT
