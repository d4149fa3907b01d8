"""Tokens: secrets that say who calls, of which a server has only the hashes, in a file of one line each.

    NAME SHA-256-IN-HEX TENANT[:ROLE][:shared-memory|:write-in-place]

Names are for people and logs. Worst case: a file that cannot be used, which raises InvalidConfiguration with
the line.
"""

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ctxcache.errors import InvalidConfiguration
from ctxcache.identity.grants import ArenaGrant, is_tenant, parse_words
from ctxcache.runtime.files import check_secret, secret_refusal

PREFIX = "ctxcache_"
"""So that whoever looks for secrets where none should be finds these."""
SECRET_BYTES = 32
FILE_LIMIT_BYTES = 4 << 20
_ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class Token:
    """What a server knows of a token. `digest`: SHA-256 of all of its text."""

    name: str
    digest: bytes
    grant: ArenaGrant

    def line(self) -> str:
        """Its line in the file."""
        return f"{self.name} {self.digest.hex()} {':'.join((self.grant.tenant, *self.grant.words()))}"


def new_secret() -> str:
    """A new token's text."""
    return PREFIX + secrets.token_urlsafe(SECRET_BYTES)


def digest_of(secret: str) -> bytes:
    """What the file has of a token. Its text is too random to be guessed from that, without salt too."""
    return hashlib.sha256(secret.encode()).digest()


class Tokens:
    """Tokens by their hash. Never changed."""

    def __init__(self, tokens: Mapping[bytes, Token] | None = None) -> None:
        """`tokens`: by digest."""
        self.by_digest = dict(tokens or {})
        # Found by a part of the hash, which a caller cannot choose, and compared in constant time by all of
        # it.
        self._by_id = {digest[:_ID_BYTES]: token for digest, token in self.by_digest.items()}

    def find(self, secret: str) -> Token | None:
        """The token of that text."""
        digest = digest_of(secret)
        token = self._by_id.get(digest[:_ID_BYTES])
        return token if token is not None and hmac.compare_digest(token.digest, digest) else None


def read_tokens(path: Path) -> Tokens:
    """The tokens of a file. Raises InvalidConfiguration."""
    try:
        # The callers' rights are there to be changed by who may write it.
        check_secret(path, secret_refusal("token_hashes", path))
        with path.open("rb") as file:
            text = file.read(FILE_LIMIT_BYTES + 1)
    except OSError as error:
        raise InvalidConfiguration(source=str(path), problem=error.strerror or str(error)) from error
    if len(text) > FILE_LIMIT_BYTES:
        raise InvalidConfiguration(source=str(path), problem=f"is larger than {FILE_LIMIT_BYTES} B")
    found: dict[bytes, Token] = {}
    for number, line in enumerate(text.decode(errors="replace").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            token = _parse(line)
        except ValueError as error:
            # Not the line itself, which may be a secret that should not be there.
            raise InvalidConfiguration(source=f"{path}, line {number}", problem=str(error)) from error
        if token.digest in found:
            raise InvalidConfiguration(source=f"{path}, line {number}", problem="the token is there twice")
        found[token.digest] = token
    return Tokens(found)


def _parse(line: str) -> Token:
    name, *rest = line.split()
    if len(rest) != 2 or not name.isprintable():
        raise ValueError("is not NAME HASH TENANT[:ROLE][:shared-memory|:write-in-place]")
    digest, (tenant, *words) = bytes.fromhex(rest[0]), rest[1].split(":")
    if len(digest) != hashlib.sha256().digest_size:
        raise ValueError("its second word is no SHA-256 hash")
    if not is_tenant(tenant):
        raise ValueError(f"{tenant!r} is no name of a tenant")
    return Token(name, digest, parse_words(tenant, words))
