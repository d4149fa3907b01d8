"""Tokens: what the file says of them, and what it must not."""

import hashlib
import os
from pathlib import Path

import pytest
from server_process import write_secret

from ctxcache.errors import InvalidConfiguration
from ctxcache.identity import ArenaGrant, Role, Token, digest_of, new_secret, read_tokens


def test_a_token_is_found_by_all_of_its_text(tmp_path: Path) -> None:
    """Its line holds nothing that it could be made from."""
    secret, other = new_secret(), new_secret()
    token = Token("ci", digest_of(secret), ArenaGrant("a", Role.OPERATOR, has_shared_memory=True))
    write_secret(tmp_path / "hashes", f"# tokens\n\n{token.line()}\n")
    found = read_tokens(tmp_path / "hashes")

    assert token.line() == f"ci {hashlib.sha256(secret.encode()).hexdigest()} a:operator:shared-memory"
    assert secret not in token.line()
    assert found.find(secret) == token
    for wrong in (other, "", secret[:-1], secret + " ", secret.upper(), token.digest.hex()):
        assert found.find(wrong) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ci", "line 1"),
        ("ci 00 a", "SHA-256"),
        (f"ci {'0' * 63}x a", "line 1"),
        (f"# fine\nci {'00' * 32} a:root", "line 2"),
        (f"ci {'00' * 32} ../a", "tenant"),
        (f"ci {'00' * 32} a:user:operator", "line 1"),
        (f"ci {'00' * 32} a\ncd {'00' * 32} b", "twice"),
    ],
)
def test_a_line_that_cannot_be_used_is_named(tmp_path: Path, text: str, words: str) -> None:
    """By its number, not by what stands there, which may be a token."""
    write_secret(tmp_path / "hashes", text)
    with pytest.raises(InvalidConfiguration, match=words) as caught:
        read_tokens(tmp_path / "hashes")
    assert "00000" not in str(caught.value)


def test_a_file_that_is_not_there_or_endless_is_refused(tmp_path: Path) -> None:
    """Instead of being read for ever."""
    for path in (tmp_path / "none", Path(os.devnull).with_name("zero")):
        with pytest.raises(InvalidConfiguration):
            read_tokens(path)
