"""Rules: which subject is let in as what."""

import pytest

from ctxcache.identity import ArenaGrant, Role, Rule, find, parse_rules


def rules(text: str) -> tuple[Rule, ...]:
    """Rules as the command line has them."""
    parsed = parse_rules(text)
    assert isinstance(parsed, tuple)
    return parsed


@pytest.mark.parametrize(
    ("rule", "subject", "tenant"),
    [
        ("spiffe://x/ns/a/sa/engine=a", "spiffe://x/ns/a/sa/engine", "a"),
        ("spiffe://x/ns/*/sa/*=$1", "spiffe://x/ns/team.b/sa/engine", "team.b"),
        ("spiffe://x/ns/*/sa/*=t-$2", "spiffe://x/ns/b/sa/c", "t-c"),
        ("spiffe://x/ns/*=$1", "spiffe://x/ns/a/sa/engine", None),  # a part is not two
        ("spiffe://x/ns/*=$1", "spiffe://x/ns/", None),  # nor none
        ("spiffe://x/ns/*=$1", "spiffe://y/ns/a", None),
        ("spiffe://x/ns/*=$1", "spiffe://x/ns/a b", None),  # no name of a tenant
        ("spiffe://x/a=a", "spiffe://x/A", None),
        ("spiffe://x.y/a=a", "spiffe://xzy/a", None),  # a dot is a dot
        ("dns:*.Engines.example=e", "dns:one.engines.EXAMPLE", "e"),
        ("dns:*.engines.example=e", "dns:one.two.engines.example", None),
        ("dns:*.engines.example=e", "dns:*.engines.example", None),  # a certificate's own wildcard is nobody
        ("dns:ops.example=e", "dns:ops.example.evil", None),
        ("dns:ops.example=e", "dns:ops.example\n", None),
        ("dns:ops.example=e", "cn:ops.example", None),
        ("cn:engine *=e", "cn:engine 7", "e"),
        ("uid:1001=e", "uid:1001", "e"),
        ("uid:1001=e", "uid:10011", None),
    ],
)
def test_a_rule_speaks_of_whom_it_names_alone(rule: str, subject: str, tenant: str | None) -> None:
    """A `*` is one part, never its borders; nothing else of a pattern means anything but itself."""
    found = find(rules(rule), [subject])

    assert (found[1].tenant if found else None) == tenant


def test_the_first_rule_decides() -> None:
    """Whichever of a subject's names it speaks of."""
    given = rules("dns:b=second:operator:shared-memory,dns:*=first")

    assert find(given, ["dns:a", "dns:b"]) == (
        "dns:b",
        ArenaGrant("second", Role.OPERATOR, has_shared_memory=True),
    )
    assert find(given, ["dns:a"]) == ("dns:a", ArenaGrant("first"))
    assert find(given, []) is None


@pytest.mark.parametrize(
    "text",
    [
        "ops=a", "spiffe://=a", "dns:a", "dns:a=", "dns:a=a b", "dns:a=$1", "dns:*=$2", "dns:a=a:root",
        "dns:a=a:user:operator", "dns:a=../b",
    ],
)  # fmt: skip
def test_what_is_no_rule_is_refused(text: str) -> None:
    """A bad rule is refused before it lets any caller in."""
    with pytest.raises(ValueError, match=r"."):
        parse_rules(text)


@pytest.mark.parametrize(
    "table", ["a", {"subject": "dns:a", "tenant": "a", "rôle": "user"}, {"subject": "dns:a"}]
)
def test_a_table_that_is_no_rule_is_refused(table: object) -> None:
    """As in the file."""
    with pytest.raises(ValueError, match=r"."):
        parse_rules([table])


def test_tables_say_the_same_as_texts() -> None:
    """The file's form and the command line's."""
    table = {"subject": "dns:*", "tenant": "$1", "role": "operator", "shared_memory": True}

    assert parse_rules([table]) == rules("dns:*=$1:operator:shared-memory")
