"""The tenants' shares as arguments, the environment and a file give them."""

from pathlib import Path

import pytest

from ctxcache.core.placement.shares import Share
from ctxcache.errors import InvalidConfiguration
from ctxcache.settings.config import load

SHARES = {"a": Share(0.5), "team b": Share(0.2, 0.4), "c": Share(0, 0.1)}


def test_shares_are_the_same_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table in the file and a line of text say the same."""
    file = tmp_path / "settings.toml"
    file.write_text(
        '[tenant_shares]\na = 0.5\n"team b" = { share = 0.2, limit = 0.4 }\nc = { limit = 0.1 }\n',
        encoding="utf-8",
    )
    text = "a=0.5, team b=0.2:0.4,c=0:0.1"

    assert load({}, file=file).tenant_shares == SHARES
    assert load({"tenant_shares": text}).tenant_shares == SHARES
    assert load({"tenant_shares": SHARES}).tenant_shares == SHARES
    monkeypatch.setenv("CTXCACHE_TENANT_SHARES", text)
    assert load({}).tenant_shares == SHARES
    monkeypatch.setenv("CTXCACHE_TENANT_SHARES", "")
    assert load({}).tenant_shares == {}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a", "not a list such as"),
        ("a=b=0.5", "not a list such as"),
        ("a=0.5,a=0.1", "twice"),
        ("a=much", "could not convert"),
        ("a=", "could not convert"),
        ("a=0.1:0.2:0.3", "neither a share"),
        ("a=0.5:0.4", "0 <= share <= limit <= 1"),
        ("a=nan", "0 <= share <= limit <= 1"),
        ("a=0.7,b=0.4", "1.1 of everything is guaranteed"),
        ("=0.1", "without a name"),
        ({"a": {"shares": 0.5}}, "neither a share"),
        ({"a": {"share": [1]}}, "float"),
        ({"a": None}, "neither a share"),
    ],
)
def test_shares_that_cannot_be_are_refused(text: object, problem: str) -> None:
    """The sentence names the setting and what is wrong with it."""
    with pytest.raises(InvalidConfiguration, match=problem) as raised:
        load({"tenant_shares": text})
    assert "tenant_shares" in str(raised.value)
