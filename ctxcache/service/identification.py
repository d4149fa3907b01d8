"""Identification: from what a connection proves to whom it is let in as.

A token decides where one is given, then a certificate, then the user of the process at the other end of a Unix socket;
what is given and does not hold is refused, not passed over. Worst case: nothing is given, which is refused with what is needed.
"""

import asyncio
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ctxcache.errors import InvalidConfiguration, PermissionDenied, Unauthenticated
from ctxcache.identity.grants import Rule, find
from ctxcache.identity.tokens import Token, Tokens, read_tokens
from ctxcache.service.caller import ANYBODY, EVERYTHING, Caller

log = logging.getLogger(__name__)

MET_LIMIT = 4096
"""Subjects kept in mind; with one more all are looked up again."""
WATCH_INTERVAL_S = 1.0
"""How often the token file is looked at unasked."""
SPIFFE = b"spiffe://"
Properties = Mapping[str, Iterable[bytes]]
"""What gRPC says of a connection's peer."""


class TokenFile:
    """The callers of a file's tokens, as it was when it was last read whole. Owned by the event loop."""

    def __init__(self, path: Path) -> None:
        """Raises InvalidConfiguration."""
        self._path = path
        self._seen = _stamp(path)
        self._tokens = read_tokens(path)
        self._callers = {digest: _caller(token) for digest, token in self._tokens.by_digest.items()}

    def caller(self, secret: str) -> Caller:
        """Whose token it is. Raises Unauthenticated."""
        token = self._tokens.find(secret)
        if token is None:
            raise Unauthenticated("the token is not known here, or not any more")
        return self._callers[token.digest]

    async def refresh(self, *, is_forced: bool = False) -> None:
        """Read the file again if it was changed. What is not in it any more is revoked; one that cannot be used changes nothing."""
        try:
            tokens = await asyncio.to_thread(self._read_changed, is_forced)
        except InvalidConfiguration as error:
            log.error("tokens_refused error=%s", error)  # noqa: TRY400  the sentence says all
            return
        if tokens is not None:
            self._adopt(tokens)
            log.info("tokens_loaded path=%s count=%d", self._path, len(tokens.by_digest))

    def _read_changed(self, is_forced: bool) -> Tokens | None:  # noqa: FBT001  a thread's target
        stamp = _stamp(self._path)
        if stamp == self._seen and not is_forced:
            return None
        self._seen = stamp
        return read_tokens(self._path)

    def _adopt(self, tokens: Tokens) -> None:
        before = self._callers
        self._tokens, self._callers = tokens, {}
        for digest, token in tokens.by_digest.items():
            known = before.pop(digest, None)
            if known is not None and (known.grant != token.grant or known.subject != _subject(token)):
                known.is_revoked, known = True, None
            self._callers[digest] = known or _caller(token)
        for caller in before.values():
            caller.is_revoked = True


class Identification:
    """Tells callers apart, by rules and by tokens. Owned by the event loop."""

    def __init__(self, rules: Sequence[Rule] = (), tokens: TokenFile | None = None) -> None:
        self._rules = tuple(rules)
        self._tokens = tokens
        self._is_asked = asyncio.Event()
        self._met: dict[tuple[str, ...], Caller] = {}
        self.is_open = not rules and tokens is None
        """Whether everybody is the same caller, because nothing is configured."""
        self.has_tokens = tokens is not None

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

    def of_rpc(self, peer: str, properties: Properties, authorizations: Sequence[str]) -> Caller:
        """Whose rpc it is, on what gRPC says of it. Raises Unauthenticated, PermissionDenied."""
        if self.is_open:
            return ANYBODY
        if self._tokens is not None and authorizations:
            return self._tokens.caller(_bearer(authorizations))
        if peer.startswith("unix:"):
            # The socket's mode lets in nobody else, root apart; gRPC does not say who it is.
            return self._of_uid(os.geteuid())
        return self._of_subjects(_names(properties))

    def check_certificate(self, caller: Caller, properties: Properties) -> None:
        """Raise Unauthenticated where a certificate says who the caller is and another one, or none, is shown here."""
        if not caller.is_certified:
            return
        found = find(self._rules, _names(properties))
        if found != (caller.subject, caller.grant):
            raise Unauthenticated(f"the ticket was given to {caller.subject}, who does not show it")

    def of_process(self, uid: int, token: str) -> Caller:
        """Who is at the other end of the control socket, on the kernel's word. Raises as `of_rpc`."""
        if self.is_open and uid in (0, os.geteuid()):
            return ANYBODY
        # Also with a token: whoever has stolen one cannot use it as another user.
        own = self._of_uid(uid)
        return self._tokens.caller(token) if self._tokens is not None and token else own

    def _of_uid(self, uid: int) -> Caller:
        subject = f"uid:{uid}"
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
        known = self._met.get(subjects)
        if known is None:
            if len(self._met) >= MET_LIMIT:
                self._met.clear()
            known = self._met[subjects] = self._meet(subjects)
        return known

    def _meet(self, subjects: tuple[str, ...]) -> Caller:
        found = find(self._rules, subjects)
        if found is None:
            problem = "is no tenant's here: a rule of `identities` has to name it"
            raise PermissionDenied(subject=" ".join(subjects)[:128], problem=problem)
        return Caller(*found)


def _names(properties: Properties) -> tuple[str, ...]:
    """A certificate's names: its SPIFFE id, else its DNS names, else its common name. One sort hides what comes after it."""
    uris = list(properties.get("peer_uri", ()))
    if any(uri.startswith(SPIFFE) for uri in uris):
        # Whoever has two has none.
        return tuple(_text(uri) for uri in uris) if len(uris) == 1 else ()
    dns = tuple(f"dns:{_text(name)}" for name in properties.get("peer_dns", ()))
    return dns or tuple(f"cn:{_text(name)}" for name in properties.get("x509_common_name", ()))


def _text(name: bytes) -> str:
    return name.decode(errors="replace")


def _bearer(authorizations: Sequence[str]) -> str:
    scheme, _, secret = authorizations[0].partition(" ")
    if len(authorizations) > 1 or scheme.lower() != "bearer" or not secret:
        raise Unauthenticated("`authorization` is not one bearer token")
    return secret


def _caller(token: Token) -> Caller:
    return Caller(_subject(token), token.grant)


def _subject(token: Token) -> str:
    return f"token:{token.name}"


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_ino, status.st_size


def identified_by(rules: Sequence[Rule], token_hashes: Path | None) -> Identification:
    """What settings ask for. Raises InvalidConfiguration."""
    return Identification(rules, None if token_hashes is None else TokenFile(token_hashes))
