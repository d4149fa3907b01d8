"""`ctxcache prefix`, every verb of it, through the real binary against a real server."""

import json
from pathlib import Path

import numpy as np
import pytest
from command_line import ctxcache, ctxcache_json
from server_process import ServerProcess
from stored import connected, model_spec, store_session

from ctxcache.cli.failures import ExitCode
from ctxcache.client import CallerModel
from ctxcache.format.streams import TOKENS, Content


@pytest.fixture
def target(running_server: ServerProcess) -> str:
    """Address of a server that has a session of the tokens 0 to 149 and one that has adopted 128 of them."""
    target = running_server.target
    with connected(target) as client:
        for name in [session.name for session in client.sessions.list()]:
            client.sessions.open(name).delete()
    store_session(target, "first", token_count=150)
    with connected(target) as client:
        second = client.sessions.create(CallerModel(model_spec()), id="second")
        assert second.adopt(range(150)).token_count == 128
    return target


@pytest.fixture
def prompt(tmp_path: Path) -> str:
    """A file with the first 140 of these tokens, and 60 others."""
    path = tmp_path / "prompt.json"
    path.write_text(json.dumps([*range(140), *range(60)]))
    return str(path)


def test_match_says_what_is_there(target: str, prompt: str) -> None:
    """The proto's names for scripts, a table for people; by tokens and by keys."""
    found = ctxcache_json(target, "prefix", "match", "tiny", prompt)
    assert found == {
        "state": "LOOKUP_STATE_HIT",
        "token_count": 128,
        "dram_token_count": 128,
        "reason": "NOT_STORED",
        "lease_token": "",
        "lease_expire_time": None,
        "ready_in": "0s",
    }
    like = ctxcache_json(target, "prefix", "match", "models/tiny", prompt, "--like", "first")
    assert like == found
    shown = ctxcache("--target", target, "prefix", "match", "tiny", prompt)
    assert "128, of which 128 are in DRAM" in shown.stdout

    [shared] = ctxcache_json(target, "prefix", "top")["prefixes"]
    by_key = ctxcache_json(target, "prefix", "match", "tiny", "--key", shared["key"])
    assert by_key["token_count"] == 0, "it is the key of the second 64 tokens"


def test_why_miss_says_why_not_more(target: str, prompt: str) -> None:
    """A sentence for people."""
    shown = ctxcache("--target", target, "prefix", "why-miss", "tiny", prompt)
    assert "128 tokens are there: no session of this model and layout has the next 64" in shown.stdout
    with connected(target) as client:
        for name in ("sessions/first", "sessions/second"):
            client.sessions.open(name).drop_ranges([(0, 1)])
    assert ctxcache_json(target, "prefix", "why-miss", "tiny", prompt)["token_count"] == 0


def test_a_session_of_salt_and_pictures_is_asked_like(target: str, prompt: str) -> None:
    """`--like` brings its salt, `--content` says what lies behind tokens; what is none is wrong use."""
    digest = "5a" * 32
    with connected(target) as client:
        model = CallerModel(model_spec())
        chat = client.sessions.create(model, id="salted", salt=b"user")
        rows = {spec.stream: np.zeros((64, spec.row_bytes), np.uint8) for spec in model.spec.streams}
        ids = {TOKENS: np.arange(64, dtype=np.int32)}
        chat.append({**ids, **rows}, contents=[Content(5, 37, bytes.fromhex(digest))])
    asked = ("prefix", "match", "tiny", prompt, "--like", "salted")
    counts = [
        ctxcache_json(target, *asked, *more)["token_count"]
        for more in (("--content", f"5:37:{digest}"), ("--content", f"5:36:{digest}"), ())
    ]
    assert counts == [64, 0, 0]
    for bad in ("5:37", f"a:37:{digest}", "5:37:zz"):
        ran = ctxcache("--target", target, *asked, "--content", bad)
        assert (ran.exit_code, "BEGIN:END:HEX" in ran.stderr) == (ExitCode.USAGE, True)


def test_top_lists_what_is_shared(target: str) -> None:
    """With what it saves."""
    listed = ctxcache_json(target, "prefix", "top", "--limit", "5")
    [shared] = listed["prefixes"]
    assert (shared["token_count"], shared["session_count"], listed["has_more"]) == (128, 2, False)
    assert shared["saved_bytes"] > 0
    assert "sessions/" not in ctxcache("--target", target, "prefix", "top").stdout


@pytest.mark.parametrize("content", ["1 2 3", "{}", "[]", "[1.5]", "[true]"])
def test_a_file_without_tokens_is_refused(target: str, tmp_path: Path, content: str) -> None:
    """As wrong use, before the server is asked."""
    path = tmp_path / "prompt.json"
    path.write_text(content)
    for arguments in ((str(path),), (str(tmp_path / "none"),), (), (str(path), "--key", "00")):
        ran = ctxcache("--target", target, "prefix", "match", "tiny", *arguments)
        assert ran.exit_code == ExitCode.USAGE
