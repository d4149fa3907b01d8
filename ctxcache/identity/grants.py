"""Identity: what somebody who proved to be a subject is let in as. Pure: subjects in, a grant out.

A subject is a text with its kind in front: `spiffe://…`, `dns:…`, `cn:…` of a certificate, `uid:…` of a
process. Worst case: every rule is looked at, once for each of the subject's names.
"""

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

KINDS = ("spiffe://", "dns:", "cn:", "uid:")
SHARED_MEMORY, WRITE_IN_PLACE = "shared-memory", "write-in-place"
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TEMPLATE = re.compile(r"(?:[A-Za-z0-9._-]|\$[1-9])+")
# What one `*` stands for: never a border of what it is a part of, nor a certificate's own wildcard.
_ANYTHING = {"spiffe://": r"([^/*]+)", "dns:": r"([^.*]+)", "cn:": r"([^*]+)", "uid:": r"([0-9]+)"}


class Role(enum.StrEnum):
    """What a caller may ask for: everything within its tenant, or what concerns the whole server too."""

    USER = "user"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class ArenaGrant:
    """What a caller is let in as.

    `has_shared_memory`: it may map the arena, where all tenants' bytes lie, to read. `writes_in_place`: to
    write as well.
    """

    tenant: str
    role: Role = Role.USER
    has_shared_memory: bool = False
    writes_in_place: bool = False

    def words(self) -> list[str]:
        """What configuration adds to the tenant's name to say it."""
        role = [self.role.value] if self.role is not Role.USER else []
        return role + ([WRITE_IN_PLACE] if self.writes_in_place else [SHARED_MEMORY] * self.has_shared_memory)


@dataclass(frozen=True, slots=True)
class Rule:
    """A subject and its grant. `*` in the subject stands for a part; `$1` in the tenant is the first one."""

    subject: str
    grant: ArenaGrant

    def __post_init__(self) -> None:
        """Raises ValueError for what no subject could be, or no tenant be called."""
        kind = next((kind for kind in KINDS if self.subject.startswith(kind)), None)
        if kind is None or self.subject == kind:
            raise ValueError(f"{self.subject!r} begins with none of {', '.join(KINDS)}")
        if not _TEMPLATE.fullmatch(self.grant.tenant):
            raise ValueError(f"{self.grant.tenant!r} is no name of a tenant")
        if any(int(number) > self.subject.count("*") for number in re.findall(r"\$(\d)", self.grant.tenant)):
            raise ValueError(f"{self.grant.tenant!r} names more parts than {self.subject!r} has")

    def apply(self, subject: str) -> ArenaGrant | None:
        """What the subject is let in as; None where the rule does not speak of it."""
        match = self._pattern().fullmatch(subject)
        if match is None:
            return None
        tenant = re.sub(r"\$(\d)", lambda part: match[int(part[1])], self.grant.tenant)
        if not is_tenant(tenant):
            return None
        return replace(self.grant, tenant=tenant)

    def _pattern(self) -> re.Pattern[str]:
        kind = next(kind for kind in KINDS if self.subject.startswith(kind))
        return re.compile(_ANYTHING[kind].join(map(re.escape, normal(self.subject).split("*"))))


def normal(subject: str) -> str:
    """A subject as it is compared: the case of a DNS name means nothing."""
    return subject.lower() if subject.startswith("dns:") else subject


def is_tenant(name: str) -> bool:
    """Whether a tenant may be called so: 1 to 64 of A-Z a-z 0-9 . _ -, beginning with a letter or digit."""
    return _TENANT.fullmatch(name) is not None


def find(rules: Iterable[Rule], subjects: Iterable[str]) -> tuple[str, ArenaGrant] | None:
    """The first rule's grant that speaks of any of the subjects, with that subject.

    What cannot be printed is nobody.
    """
    names = [normal(subject) for subject in subjects if subject.isprintable()]
    for rule in rules:
        for name in names:
            if grant := rule.apply(name):
                return name, grant
    return None


def parse_grant(
    tenant: str, *, role: str = Role.USER, shared_memory: object = False, write_in_place: object = False
) -> ArenaGrant:
    """A grant as configuration says it; to write in place is to read too. Raises ValueError."""
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
