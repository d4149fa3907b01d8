"""Logs: every event has a name and fields, in either format."""

import ast
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from parsing import parse

from ctxcache.runtime.logs import TEMPLATE, JsonLines, Repeats

SOURCES = Path(__file__).parent.parent / "ctxcache"
LEVELS = {"debug", "info", "warning", "error", "exception"}


def _calls() -> Iterator[tuple[str, str, str, int]]:
    """Where something is logged, its level, its template, and how many values come with it."""
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            is_ours = isinstance(node.func.value, ast.Name) and node.func.value.id == "log"
            if is_ours and node.func.attr in LEVELS:
                where, template = f"{path.relative_to(SOURCES)}:{node.lineno}", node.args[0]
                assert isinstance(template, ast.Constant), where
                assert isinstance(template.value, str), where
                yield where, node.func.attr.replace("exception", "error"), template.value, len(node.args) - 1


def test_every_event_has_a_name_and_named_fields() -> None:
    """A fixed template, as many values as keys: whoever reads logs by machine needs no parser."""
    found = list(_calls())
    for where, _, template, value_count in found:
        assert TEMPLATE.fullmatch(template), where
        assert template.count("%") == value_count, where
    assert len(found) > 20


def test_every_event_is_in_the_documents_table() -> None:
    """In the list of its level."""
    text = (SOURCES.parent / "docs" / "logs.md").read_text()
    lists = {level: text.partition(f"### {level.title()}s: ")[2].partition("\n#")[0] for level in LEVELS}
    for where, level, template, _ in _calls():
        assert f"\n- `{template.partition(' ')[0]}`: " in lists[level], where


@pytest.fixture
def logger() -> Iterator[tuple[logging.Logger, io.StringIO]]:
    """A logger of its own, in JSON."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    made = logging.getLogger("ctxcache.test_log_format")
    made.addHandler(handler)
    yield made, stream
    made.removeHandler(handler)


def test_json_has_the_fields(logger: tuple[logging.Logger, io.StringIO]) -> None:
    """Numbers as numbers; text with spaces, quotes and line breaks in one field of one line."""
    log, stream = logger
    log.warning("path_rests path=%s problem=%s count=%d", "/a b", 'no "room"\nleft', 3)

    (line,) = stream.getvalue().splitlines()
    event = json.loads(line)
    assert event.pop("time").endswith("+00:00")
    assert event == {
        "level": "warning", "logger": "ctxcache.test_log_format", "event": "path_rests", "path": "/a b",
        "problem": 'no "room"\nleft', "count": 3,
    }  # fmt: skip


def test_json_of_others_and_of_failures(logger: tuple[logging.Logger, io.StringIO]) -> None:
    """A library's line is a message; a traceback is a field."""
    log, stream = logger
    log.warning("Something %s, 100%%", "else")
    try:
        raise ValueError("bad")  # noqa: TRY301
    except ValueError:
        log.exception("internal_error")
    log.warning("audit subject=%s result=%s", json.dumps("me=you"), "{not json")

    message, failure, audit = map(json.loads, stream.getvalue().splitlines())
    assert message["message"] == "Something else, 100%"
    assert failure["event"] == "internal_error"
    assert "ValueError: bad" in failure["traceback"]
    assert (audit["subject"], audit["result"]) == ("me=you", "{not json")


def test_what_a_library_repeats_is_told_once_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """An accept without descriptors fails again and again; our own events all come through."""
    now_s = [100.0]
    monkeypatch.setattr("ctxcache.runtime.logs.time.monotonic", lambda: now_s[0])
    repeats, stream = Repeats(), io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(repeats)

    def say(name: str, template: str, *values: object) -> None:
        handler.handle(logging.LogRecord(name, logging.ERROR, "", 0, template, values, None))

    for i in range(50):
        say("asyncio", "socket.accept() out of system resource")
        say("ctxcache.service.bulk", "bulk_accept_failed error=%s", i)
        say("ctxcache.cache", "path_rests path=%s", i)
    now_s[0] += 60
    say("asyncio", "socket.accept() out of system resource")

    lines = stream.getvalue().splitlines()
    assert [line for line in lines if "accept" in line] == [
        "socket.accept() out of system resource",
        "bulk_accept_failed error=0",
        "socket.accept() out of system resource (and 49 times more)",
    ]
    assert sum("path_rests" in line for line in lines) == 50
