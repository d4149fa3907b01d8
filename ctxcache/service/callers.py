"""Callers: who is calling, found from what a connection proves, never from a request's field.

    what is given                          subject               found by
    a bearer token                         token:NAME            the token file
    else a certificate                     spiffe:// dns: cn:    rules
    else a Unix socket, by its process     uid:N                 rules, or the server's own user

A credential that is given and invalid is refused, not passed over. The edge finds the caller of each rpc
before it looks at anything else of it; from there the caller is the one of everything that the rpc's task
does. Owned by the event loop. Worst case: nothing is given, which is refused with what is needed.
"""

import asyncio
import json
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from ctxcache.errors import (
    CacheError,
    InvalidArgument,
    InvalidConfiguration,
    PermissionDenied,
    Unauthenticated,
)
from ctxcache.identity import ArenaGrant, Role, Rule, Token, Tokens, find, is_tenant, read_tokens
from ctxcache.runtime import spans
from ctxcache.runtime.files import is_shortage, stamp

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
"""gRPC's own, generic over messages that the edge knows as bytes."""
Properties = Mapping[str, Iterable[bytes]]
"""The properties that gRPC has of a connection's peer."""

DEFAULT_TENANT = "default"
CERTIFIED = ("spiffe://", "dns:", "cn:")
TENANT_HEADER = "ctxcache-tenant"
"""Request metadata by which an operator names whose sessions a call is about."""
AUTHORIZATION = "authorization"
OPERATORS_ONLY = "/ctxcache.v1.AdminService/"
PEERS_ONLY = "/ctxcache.v1.PeerService/"
FOR_OTHERS = frozenset(
    f"/ctxcache.v1.{service}/{method}"
    for service, methods in {
        "SessionService": (
            "GetSession",
            "ListSessions",
            "UpdateSession",
            "TruncateSession",
            "ForkSession",
            "FlushSession",
            "DeleteSession",
        ),
        "ModelService": ("GetModel", "ListModels", "ForgetModel"),
        "HintService": ("Hint",),
        "AdminService": ("DemoteSession", "EvictSession", "DeleteModel"),
    }.items()
    for method in methods
)
"""The calls that an operator may make for another tenant.

Nothing that shows rows, and nothing that begins a tenant.
"""
MET_LIMIT = 4096
"""Callers kept by their subjects. With one more all are looked up again."""
WATCH_INTERVAL_S = 1.0
"""How often the token file is looked at unasked."""
REFUSALS_INTERVAL_S = 1.0
"""Time between two lines of the audit log about callers that were refused."""
SPIFFE = b"spiffe://"
EVERYTHING = ArenaGrant(DEFAULT_TENANT, Role.OPERATOR, has_shared_memory=True, writes_in_place=True)
"""The grant of every caller where callers are not told apart, and always of the server's own user."""
log = logging.getLogger(__name__)
audit_log = logging.getLogger("ctxcache.audit")


# -- a caller -----------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Caller:
    """A caller that was let in. `subject`: the name by which logs and refusals call it."""

    subject: str
    grant: ArenaGrant
    acts_for: bool = False
    """An operator that names a tenant other than its own; each call is audited."""
    is_revoked: bool = False
    """The credential was revoked, whatever connection it was given on."""

    @property
    def tenant(self) -> str:
        """The tenant whose sessions the caller sees."""
        return self.grant.tenant

    @property
    def is_certified(self) -> bool:
        """Whether a certificate says who the caller is."""
        return self.subject.startswith(CERTIFIED)

    def check(self) -> None:
        """Raise Unauthenticated when the credential was revoked after the caller came."""
        # The error is raised at use: the holder of a connection finds out at its next step.
        if self.is_revoked:
            raise Unauthenticated(f"{self.subject} was revoked")

    def check_operator(self, what: str) -> None:
        """Raise PermissionDenied unless the caller may do what concerns others too."""
        if self.grant.role is not Role.OPERATOR:
            raise PermissionDenied(subject=self.subject, problem=f"{what} needs the role operator")

    def check_peer(self, method: str) -> None:
        """Raise PermissionDenied for a peer elsewhere than among peers, and for others there."""
        role, is_among_peers = self.grant.role, method.startswith(PEERS_ONLY)
        if role is Role.PEER and not is_among_peers:
            raise PermissionDenied(
                subject=self.subject, problem="the role peer may ask what stores ask alone"
            )
        if is_among_peers and role is Role.USER:
            raise PermissionDenied(subject=self.subject, problem="this call needs the role peer")

    def acting_for(self, tenant: str) -> "Caller":
        """The caller with another tenant's sessions. Raises PermissionDenied, InvalidArgument."""
        # A caller that names its own tenant keeps its rights.
        if tenant == self.tenant:
            return self
        self.check_operator(f"acting for tenant {tenant!r}")
        if not is_tenant(tenant):
            raise InvalidArgument(field=TENANT_HEADER, problem="is no name of a tenant")
        return Caller(self.subject, replace(self.grant, tenant=tenant), acts_for=True)

    def check_shared_memory(self) -> None:
        """Raise PermissionDenied unless the caller may see all of the arena."""
        if not self.grant.has_shared_memory:
            problem = "has no shared memory here: read and append by stream"
            raise PermissionDenied(subject=self.subject, problem=problem)


ANYBODY = Caller("anybody", EVERYTHING)
"""The caller where callers are not told apart."""
_CALLER: ContextVar[Caller] = ContextVar("caller")


def current() -> Caller:
    """The caller of this task's rpc. Raises LookupError in a task that the edge did not begin."""
    return _CALLER.get()


def let_in_anybody(_: Context) -> Caller:
    """Make ANYBODY the caller of this task, for rpcs that are open to all."""
    _CALLER.set(ANYBODY)
    return ANYBODY


# -- tokens -------------------------------------------------------------------------------------------


class TokenFile:
    """The callers of a file's tokens, as it was when it was last read whole. Owned by the event loop."""

    def __init__(self, path: Path) -> None:
        """Raises InvalidConfiguration."""
        self._path = path
        self._seen = stamp(path)
        self._tokens = read_tokens(path)
        # Connections keep these objects: a change of rights makes a new one, and revokes the old.
        # The file is read in a thread: a slow mount must not hold up the loop.
        self._callers = {digest: _caller(token) for digest, token in self._tokens.by_digest.items()}

    def caller(self, secret: str) -> Caller:
        """The caller whose token it is. Raises Unauthenticated."""
        token = self._tokens.find(secret)
        if token is None:
            raise Unauthenticated("the token is not known here, or not any more")
        return self._callers[token.digest]

    async def refresh(self, *, is_forced: bool = False) -> None:
        """Read the file again if it was changed.

        A token that is not in it any more is revoked. A file that cannot be used changes nothing.
        """
        try:
            tokens = await asyncio.to_thread(self._read_changed, is_forced)
        # A half-written file is refused, and the earlier tokens go on.
        except InvalidConfiguration as error:
            if is_shortage(error):
                # The file is read again at the next look: a revoked token would else go on until the file
                # changes again.
                self._seen = ()
            log.error("tokens_refused error=%s", error)  # noqa: TRY400  the sentence says all
            return
        if tokens is not None:
            self._adopt(tokens)
            log.info("tokens_loaded path=%s count=%d", self._path, len(tokens.by_digest))

    def _read_changed(self, is_forced: bool) -> Tokens | None:  # noqa: FBT001  a thread's target
        stamped = stamp(self._path)
        if stamped == self._seen and not is_forced:
            return None
        # The stamp is noted before the read: a file that changes meanwhile is looked at once more.
        self._seen = stamped
        return read_tokens(self._path)

    def _adopt(self, tokens: Tokens) -> None:
        before = self._callers
        self._tokens, self._callers = tokens, {}
        for digest, token in tokens.by_digest.items():
            # The tokens left in `before` at the end have gone from the file.
            known = before.pop(digest, None)
            if known is not None and (known.grant != token.grant or known.subject != _subject(token)):
                # Other rights make another caller: connections that hold the old one must come again.
                known.is_revoked, known = True, None
            self._callers[digest] = known or _caller(token)
        for caller in before.values():
            caller.is_revoked = True


# -- from connections to callers ----------------------------------------------------------------------


class Identification:
    """Tells callers apart, by rules and by tokens. Owned by the event loop."""

    def __init__(self, rules: Sequence[Rule] = (), tokens: TokenFile | None = None) -> None:
        self._rules = tuple(rules)
        self._tokens = tokens
        self._is_asked = asyncio.Event()
        self._met: dict[tuple[str, ...], Caller] = {}
        self._refusals = _Refusals()
        self.is_open = not rules and tokens is None
        """Whether everybody is the same caller, because nothing is configured."""

    @property
    def uids(self) -> frozenset[int | None]:
        """Users that rules speak of; None where one speaks of all."""
        subjects = (rule.subject for rule in self._rules if rule.subject.startswith("uid:"))
        texts = (subject.removeprefix("uid:") for subject in subjects)
        return frozenset(int(text) if text.isdecimal() else None for text in texts)

    def reload(self) -> None:
        """Let the token file be looked at again now."""
        self._is_asked.set()

    async def watch(self) -> None:
        """Look at the token file for ever; ends by cancellation."""
        while self._tokens is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(WATCH_INTERVAL_S):
                    await self._is_asked.wait()
            is_forced = self._is_asked.is_set()
            self._is_asked.clear()
            await self._tokens.refresh(is_forced=is_forced)

    def let_in(self, context: Context, method: str) -> Caller:
        """Find an rpc's caller, who may call the method, and make it this task's.

        The request is not read. Raises Unauthenticated, PermissionDenied, InvalidArgument.
        """
        try:
            # Each rpc is asked anew, which takes microseconds: an address may be another process's by now.
            caller = ANYBODY if self.is_open else self._of_rpc(context)
            if method.startswith(OPERATORS_ONLY):
                caller.check_operator(method.rpartition("/")[2])
            caller.check_peer(method)
            # The header counts for named calls only, so that rows are never shown across tenants.
            if method in FOR_OTHERS:
                for key, value in context.invocation_metadata() or ():
                    if key == TENANT_HEADER:
                        caller = caller.acting_for(str(value))
                        break
        except CacheError as error:
            # Refusals are logged without their secrets, and one line a second at most.
            self._refusals.note(error, peer=context.peer(), method=method)
            raise
        _CALLER.set(caller)
        spans.TRACE_PARENT.set(partial(_trace_parent, context))
        return caller

    def of_process(self, uid: int, token: str) -> Caller:
        """Find the caller of the control socket, on the kernel's word. Raises as `let_in`."""
        # Without rules, the server's own user and root may do everything.
        if self.is_open and uid in (0, os.geteuid()):
            return ANYBODY
        # The user counts beside a token, too: a stolen token is of no use to another user.
        own = self._of_uid(uid)
        return self._tokens.caller(token) if self._tokens is not None and token else own

    def check_certificate(self, caller: Caller, properties: Properties) -> None:
        """Raise Unauthenticated where the caller was let in by a certificate that is not shown here."""
        if not caller.is_certified:
            return
        found = find(self._rules, _names(properties))
        # A peer's ticket is of the tenant whose session it was given for.
        if caller.grant.role is Role.PEER and found is not None and found[0] == caller.subject:
            return
        # The same rule must match: another rule of the same tenant may give other rights.
        if found != (caller.subject, caller.grant):
            raise Unauthenticated(f"the ticket was given to {caller.subject}, who does not show it")

    def _of_rpc(self, context: Context) -> Caller:
        if self._tokens is not None:
            metadata = context.invocation_metadata() or ()
            given = [str(value) for key, value in metadata if key == AUTHORIZATION]
            if given:
                # A token that is wrong is refused. The certificate is not tried instead, or a typing error
                # would go unnoticed.
                return self._tokens.caller(_bearer(given))
        if context.peer().startswith("unix:"):
            # The socket's mode lets in this user and root alone; gRPC does not say which one it is.
            return self._of_uid(os.geteuid())
        return self._of_subjects(_names(context.auth_context()))

    def _of_uid(self, uid: int) -> Caller:
        subject = f"uid:{uid}"
        # Root and the server's own user can read its memory anyway: without a rule they may do everything.
        if not find(self._rules, (subject,)) and uid in (0, os.geteuid()):
            return self._met.setdefault((subject,), Caller(subject, EVERYTHING))
        try:
            return self._of_subjects((subject,))
        except PermissionDenied as error:
            raise Unauthenticated(
                f"user {uid} may not use the arena of user {os.geteuid()}", uid=uid
            ) from error

    def _of_subjects(self, subjects: tuple[str, ...]) -> Caller:
        if not subjects:
            raise Unauthenticated(
                "neither a token nor a certificate was given, and this server asks who calls"
            )
        # The same certificate comes with each call: its rules are matched once.
        known = self._met.get(subjects)
        if known is not None:
            return known
        match = find(self._rules, subjects)
        if match is None:
            problem = "is no tenant's here: a rule of `identities` has to name it"
            raise PermissionDenied(subject=" ".join(subjects)[:128], problem=problem)
        # All are forgotten at once, which is cheap: the rules find each of them again.
        if len(self._met) >= MET_LIMIT:
            self._met.clear()
        known = self._met[subjects] = Caller(*match)
        return known


class _Refusals:
    """Writes refused callers to the audit log: one line a second, with how many there were in between."""

    def __init__(self) -> None:
        self._not_before_s = 0.0
        self._unwritten_count = 0

    def note(self, error: CacheError, *, peer: str, method: str) -> None:
        """Note that a caller at `peer` was refused."""
        now_s = time.monotonic()
        # A flood of refusals makes one line, with their number.
        if now_s < self._not_before_s:
            self._unwritten_count += 1
            return
        audit_log.warning(
            "caller_refused peer=%s method=%s reason=%s error=%s others=%d",
            json.dumps(peer),
            method,
            error.reason,
            json.dumps(str(error)),
            self._unwritten_count,
        )
        self._not_before_s, self._unwritten_count = now_s + REFUSALS_INTERVAL_S, 0


def identified_by(rules: Sequence[Rule], token_hashes: Path | None) -> Identification:
    """Tell callers apart as settings say. Raises InvalidConfiguration."""
    return Identification(rules, None if token_hashes is None else TokenFile(token_hashes))


def _trace_parent(context: Context) -> str:
    metadata = context.invocation_metadata() or ()
    return next((str(value) for key, value in metadata if key == spans.HEADER), "")


def _names(properties: Properties) -> tuple[str, ...]:
    """A certificate's names: its SPIFFE id, else its DNS names, else its common name.

    A name of one kind hides those of the kinds after it. Two SPIFFE ids are none.
    """
    uris = list(properties.get("peer_uri", ()))
    # A SPIFFE id says what the workload is, and hides names that other authorities may have put there.
    if any(uri.startswith(SPIFFE) for uri in uris):
        # SPIFFE: a certificate has exactly one URI, and any other number is no identity.
        return tuple(_text(uri) for uri in uris) if len(uris) == 1 else ()
    dns = tuple(f"dns:{_text(name)}" for name in properties.get("peer_dns", ()))
    return dns or tuple(f"cn:{_text(name)}" for name in properties.get("x509_common_name", ()))


def _text(name: bytes) -> str:
    return name.decode(errors="replace")


def _bearer(authorizations: Sequence[str]) -> str:
    scheme, _, secret = authorizations[0].partition(" ")
    # Several headers might be read differently by proxies in between.
    if len(authorizations) > 1 or scheme.lower() != "bearer" or not secret:
        raise Unauthenticated("`authorization` is not one bearer token")
    return secret


def _caller(token: Token) -> Caller:
    return Caller(_subject(token), token.grant)


def _subject(token: Token) -> str:
    return f"token:{token.name}"
