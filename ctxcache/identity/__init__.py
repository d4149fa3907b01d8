"""Identity: subjects and tokens of callers, and the grant each is let in with.

A subject is a text with its kind in front: `spiffe://…`, `dns:…`, `cn:…` of a certificate, `uid:…` of a
process. A token is a secret; the server has only its hash, in a file of one line each:

    NAME SHA-256-IN-HEX TENANT[:ROLE][:shared-memory|:write-in-place]

Names are for people and logs. Worst case: a file that cannot be used, which raises InvalidConfiguration with
the line; every rule is looked at, once for each of a subject's names.
"""

import enum
import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ctxcache.errors import InvalidConfiguration
from ctxcache.runtime.files import check_secret, secret_refusal

KINDS = ("spiffe://", "dns:", "cn:", "uid:")
SHARED_MEMORY, WRITE_IN_PLACE = "shared-memory", "write-in-place"
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TEMPLATE = re.compile(r"(?:[A-Za-z0-9._-]|\$[1-9])+")
# The texts that one `*` matches. None has a border of its part, nor a certificate's own wildcard.
_ANYTHING = {"spiffe://": r"([^/*]+)", "dns:": r"([^.*]+)", "cn:": r"([^*]+)", "uid:": r"([0-9]+)"}


class Role(enum.StrEnum):
    """The rights of a caller.

    A user's are all within its tenant, an operator's also what concerns the whole server. A peer is another
    store of the fleet: it may ask what stores ask each other, of any tenant, and nothing else.
    """

    USER = "user"
    OPERATOR = "operator"
    PEER = "peer"


@dataclass(frozen=True, slots=True)
class ArenaGrant:
    """The identity and rights that a caller is let in with.

    `has_shared_memory`: the caller may map the arena, where all tenants' bytes lie, to read.
    `writes_in_place`: also to write.
    """

    tenant: str
    role: Role = Role.USER
    has_shared_memory: bool = False
    writes_in_place: bool = False

    def words(self) -> list[str]:
        """The words that configuration adds to the tenant's name."""
        role = [self.role.value] if self.role is not Role.USER else []
        return role + ([WRITE_IN_PLACE] if self.writes_in_place else [SHARED_MEMORY] * self.has_shared_memory)


# From a caller to what it may do:
#
#     certificate, or a user ──► subjects ──► rules, in their order ──► the first that fits ──► grant
#     token ──► SHA-256 ──► file of hashes ──► grant
@dataclass(frozen=True, slots=True)
class Rule:
    """A subject and its grant. `*` in the subject stands for a part; `$1` in the tenant is the first one."""

    subject: str
    grant: ArenaGrant

    def __post_init__(self) -> None:
        """Raises ValueError for an impossible subject or tenant name."""
        kind = next((kind for kind in KINDS if self.subject.startswith(kind)), None)
        if kind is None or self.subject == kind:
            raise ValueError(f"{self.subject!r} begins with none of {', '.join(KINDS)}")
        if not _TEMPLATE.fullmatch(self.grant.tenant):
            raise ValueError(f"{self.grant.tenant!r} is no name of a tenant")
        if any(int(number) > self.subject.count("*") for number in re.findall(r"\$(\d)", self.grant.tenant)):
            raise ValueError(f"{self.grant.tenant!r} names more parts than {self.subject!r} has")

    def apply(self, subject: str) -> ArenaGrant | None:
        """The grant of the subject; None where the rule does not match it."""
        match = self._pattern().fullmatch(subject)
        if match is None:
            return None
        tenant = re.sub(r"\$(\d)", lambda part: match[int(part[1])], self.grant.tenant)
        # A part that is no tenant's name gives no grant: a later rule may.
        if not is_tenant(tenant):
            return None
        return replace(self.grant, tenant=tenant)

    def _pattern(self) -> re.Pattern[str]:
        kind = next(kind for kind in KINDS if self.subject.startswith(kind))
        # All but `*` is literal: a dot of a name matches a dot alone.
        return re.compile(_ANYTHING[kind].join(map(re.escape, normal(self.subject).split("*"))))


def normal(subject: str) -> str:
    """A subject as it is compared: the case of a DNS name means nothing."""
    return subject.lower() if subject.startswith("dns:") else subject


def is_tenant(name: str) -> bool:
    """Whether a name may be a tenant's: 1 to 64 of A-Z a-z 0-9 . _ -, beginning with a letter or digit."""
    return _TENANT.fullmatch(name) is not None


def find(rules: Iterable[Rule], subjects: Iterable[str]) -> tuple[str, ArenaGrant] | None:
    """The grant of the first rule that matches a subject, with that subject.

    A subject that cannot be printed matches no rule.
    """
    # A name that cannot be printed could look like another one in a log.
    names = [normal(subject) for subject in subjects if subject.isprintable()]
    # Rules are the outer loop: the configuration's order decides, not that of a certificate.
    for rule in rules:
        for name in names:
            if grant := rule.apply(name):
                return name, grant
    return None


def parse_grant(
    tenant: str, *, role: str = Role.USER, shared_memory: object = False, write_in_place: object = False
) -> ArenaGrant:
    """A grant as configuration says it; to write in place is to read too. Raises ValueError."""
    # Each value is checked before it is used: a word such as "false" is a text, and true.
    if role not in list(Role):
        raise ValueError(f"{role!r} is neither {' nor '.join(Role)}")
    for name, value in (("shared_memory", shared_memory), ("write_in_place", write_in_place)):
        if not isinstance(value, bool):
            problem = f"{name}: {value!r} is neither true nor false"
            raise ValueError(problem)  # noqa: TRY004  a setting's value
    return ArenaGrant(tenant, Role(role), bool(shared_memory or write_in_place), bool(write_in_place))


def parse_words(tenant: str, words: Iterable[str]) -> ArenaGrant:
    """A grant as one line says it: `TENANT`, then `ROLE`, `shared-memory` or `write-in-place`.

    Raises ValueError.
    """
    given = set(words)
    roles = given - {SHARED_MEMORY, WRITE_IN_PLACE}
    if len(roles) > 1:
        raise ValueError(f"{' and '.join(sorted(roles))} are not one role")
    return parse_grant(
        tenant,
        role=next(iter(roles), Role.USER),
        shared_memory=SHARED_MEMORY in given,
        write_in_place=WRITE_IN_PLACE in given,
    )


def parse_rules(value: object) -> object:
    """`SUBJECT=TENANT[:ROLE][:shared-memory|:write-in-place],…`, or a list of tables. Raises ValueError."""
    if isinstance(value, str):
        value = [_parse_rule(text.strip()) for text in value.split(",") if text.strip()]
    if not isinstance(value, (list, tuple)):
        return value
    return tuple(given if isinstance(given, Rule) else _rule(given) for given in value)


def _parse_rule(text: str) -> Rule:
    subject, equals, rest = text.rpartition("=")
    tenant, *words = rest.split(":")
    if not equals:
        shape = f"SUBJECT=TENANT[:ROLE][:{SHARED_MEMORY}|:{WRITE_IN_PLACE}]"
        raise ValueError(f"{text!r} is not {shape}")
    return Rule(subject, parse_words(tenant, words))


def _rule(given: object) -> Rule:
    fields = {"subject", "tenant", "role", "shared_memory", "write_in_place"}
    if not isinstance(given, Mapping) or set(given) - fields:
        raise ValueError(
            f"{given!r} is not a table of subject, tenant, role, shared_memory and write_in_place"
        )
    grant = parse_grant(
        str(given.get("tenant", "")),
        role=str(given.get("role", Role.USER)),
        shared_memory=given.get("shared_memory", False),
        write_in_place=given.get("write_in_place", False),
    )
    return Rule(str(given.get("subject", "")), grant)


PREFIX = "ctxcache_"
"""Every token begins so, for scanners that look for secrets in wrong places."""
SECRET_BYTES = 32
FILE_LIMIT_BYTES = 4 << 20
_ID_BYTES = 8


@dataclass(frozen=True, slots=True)
class Token:
    """A token, as a server knows it. `digest`: SHA-256 of all of its text."""

    name: str
    digest: bytes
    grant: ArenaGrant

    def line(self) -> str:
        """The token's line in the file."""
        return f"{self.name} {self.digest.hex()} {':'.join((self.grant.tenant, *self.grant.words()))}"


def new_secret() -> str:
    """A new token's text."""
    return PREFIX + secrets.token_urlsafe(SECRET_BYTES)


def digest_of(secret: str) -> bytes:
    """The digest of a token, as the file has it.

    The text is too random to be guessed from the digest, also without salt.
    """
    return hashlib.sha256(secret.encode()).digest()


class Tokens:
    """Tokens by their hash. Never changed."""

    def __init__(self, tokens: Mapping[bytes, Token] | None = None) -> None:
        """`tokens`: by digest."""
        self.by_digest = dict(tokens or {})
        # The table has a part of the hash, which a caller cannot choose. The whole hash is compared in
        # constant time.
        self._by_id = {digest[:_ID_BYTES]: token for digest, token in self.by_digest.items()}

    def find(self, secret: str) -> Token | None:
        """The token of that text."""
        digest = digest_of(secret)
        token = self._by_id.get(digest[:_ID_BYTES])
        return token if token is not None and hmac.compare_digest(token.digest, digest) else None


def read_tokens(path: Path) -> Tokens:
    """The tokens of a file. Raises InvalidConfiguration."""
    try:
        # A user who may write the file may change the callers' rights.
        check_secret(path, secret_refusal("token_hashes", path))
        with path.open("rb") as file:
            # One byte more tells a file that is too large from one that just fits.
            text = file.read(FILE_LIMIT_BYTES + 1)
    except OSError as error:
        raise InvalidConfiguration(source=str(path), problem=error.strerror or str(error)) from error
    if len(text) > FILE_LIMIT_BYTES:
        raise InvalidConfiguration(source=str(path), problem=f"is larger than {FILE_LIMIT_BYTES} B")
    tokens: dict[bytes, Token] = {}
    for number, line in enumerate(text.decode(errors="replace").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            token = _parse(line)
        except ValueError as error:
            # The line itself is not shown: it may be a secret that should not be there.
            raise InvalidConfiguration(source=f"{path}, line {number}", problem=str(error)) from error
        if token.digest in tokens:
            raise InvalidConfiguration(source=f"{path}, line {number}", problem="the token is there twice")
        tokens[token.digest] = token
    return Tokens(tokens)


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
