"""Who is calling: of a connection's credentials, never of a request's field.

The edge says it once for each rpc, before anything else; from there it is the caller of everything that the rpc's task does.
Worst case: nobody has said it, which is an internal error, never another's tenant.
"""

from contextvars import ContextVar
from dataclasses import dataclass, replace

from ctxcache.errors import InvalidArgument, PermissionDenied, Unauthenticated
from ctxcache.identity.grants import Grant, Role, is_tenant

DEFAULT_TENANT = "default"
CERTIFIED = ("spiffe://", "dns:", "cn:")
TENANT_HEADER = "ctxcache-tenant"
"""Request metadata by which an operator names whose sessions a call is about."""
EVERYTHING = Grant(DEFAULT_TENANT, Role.OPERATOR, has_shared_memory=True, writes_in_place=True)
"""What everybody is let in as where nobody is told apart, and whoever has the server's own user."""


@dataclass(slots=True, eq=False)
class Caller:
    """Somebody who was let in. `subject`: as whom, for logs and refusals."""

    subject: str
    grant: Grant
    acts_for: bool = False
    """An operator that names a tenant other than its own; each call is audited."""
    is_revoked: bool = False
    """Its credential holds no longer, whatever connection it was given on."""

    @property
    def tenant(self) -> str:
        """Whose sessions are there for it."""
        return self.grant.tenant

    @property
    def is_certified(self) -> bool:
        """Whether a certificate says who it is."""
        return self.subject.startswith(CERTIFIED)

    def check(self) -> None:
        """Raise Unauthenticated when its credential was revoked since it came."""
        if self.is_revoked:
            raise Unauthenticated(f"{self.subject} was revoked")

    def check_operator(self, what: str) -> None:
        """Raise PermissionDenied unless it may do what concerns others too."""
        if self.grant.role is not Role.OPERATOR:
            raise PermissionDenied(subject=self.subject, problem=f"{what} needs the role operator")

    def acting_for(self, tenant: str) -> "Caller":
        """Itself with another tenant's sessions. Raises PermissionDenied, InvalidArgument."""
        if tenant == self.tenant:
            return self
        self.check_operator(f"acting for tenant {tenant!r}")
        if not is_tenant(tenant):
            raise InvalidArgument(field=TENANT_HEADER, problem="is no name of a tenant")
        return Caller(self.subject, replace(self.grant, tenant=tenant), acts_for=True)

    def check_shared_memory(self) -> None:
        """Raise PermissionDenied unless it may see all of the arena."""
        if not self.grant.has_shared_memory:
            problem = "has no shared memory here: read and append by stream"
            raise PermissionDenied(subject=self.subject, problem=problem)


ANYBODY = Caller("anybody", EVERYTHING)
"""The caller where nobody is told apart."""
_CALLER: ContextVar[Caller] = ContextVar("caller")


def let_in(caller: Caller) -> None:
    """Let it be the caller of whatever this task does from here on."""
    _CALLER.set(caller)


def current() -> Caller:
    """Whose rpc this is."""
    return _CALLER.get()
