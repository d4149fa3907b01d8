"""What a request to a real llama.cpp may say, and what its reply says: whatever comes, the server answers.

Run by `make engines`, in an environment that has llama.cpp.
"""

import json
import re
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

import ctxcache
from gpu_worker.engines.llamacpp.keeper import PART_BYTES, SlotKeeper
from tests.engines.llamacpp_sessions import (
    ABSENT,
    HELLO,
    READY,
    SPACE,
    START_S,
    SUBJECTS,
    Conversation,
    Llama,
    keeper,
    model,
    store,
)
from tests.server_process import ServerProcess

__all__ = ["keeper", "model", "store"]


@pytest.fixture(scope="module")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Llama]:
    """A server with one slot and a store."""
    place = tmp_path_factory.mktemp("requests")
    with ServerProcess(place / "data") as server, Llama(model, server.target, place) as llama:
        llama.wait_for(READY)
        yield llama
        assert llama.process.poll() is None
        assert "Traceback" not in llama.log


DEEP = b"[" * 2000 + b"]" * 2000


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"prompt": "a", "x": %b}' % DEEP, "nested"),
        (b'{"prompt": "a", "x": %b}' % (b"[" * 101 + b"]" * 101), "nested"),
        (b'{"prompt": "a", "x": NaN}', "NaN"),
        (b'{"prompt": "a", "x": -Infinity}', "Infinity"),
        (b'{"prompt": "a", "temperature": 1e999}', "1e999"),
        (b'{"prompt": "a", "seed": %b}' % (b"9" * 5000), "digits"),
        (b'{"prompt": "\xff"}', "UTF-8"),
        ('{"prompt": "a"}'.encode("utf-16"), "UTF-8"),
        (b"[]", "no object"),
        (b"", "no object"),
        (b'{"prompt": "a", "grammar": "root ::= %b"}' % (b"(" * 50_000), "grammar"),
        (b'{"prompt": "a", "json_schema": {"type": "string", "pattern": "^%b$"}}' % (b"(" * 9000), "pattern"),
        (b'{"prompt": "a", "lora": [{"id": 0, "scale": 1.0}]}', "lora"),
        (b'{"prompt": "a", "lora": 7}', "lora"),
        (b'{"prompt": "a", "lora": [], "lora": [{"id": 0}]}', "lora"),
        (b'{"prompt": "a", "image_data": [{"data": "", "id": 1}]}', "image_data"),
        (b'{"prompt": "a", "n_cache_reuse": 1}', "n_cache_reuse"),
        (b'{"prompt": "a", "id_slot": "0"}', "id_slot"),
        (b'{"prompt": "a", "samplers": "alice@example.com"}', "top_k"),
        (b'{"prompt": "a", "samplers": ["infill", "top_k"]}', "top_k"),
        (b'{"prompt": "a", "samplers": ["top_k", "infill"], "top_k": 0}', "top_k"),
    ],
)
def test_a_body_that_cannot_be_followed_is_refused_with_its_reason(
    shared: Llama, body: bytes, words: str
) -> None:
    """Before llama.cpp hears of it, which some of these end."""
    status, _, data = shared.request("POST", "/completion", body)
    assert (status, json.loads(data)["error"]["type"]) == (400, "ctxcache")
    assert words in json.loads(data)["error"]["message"]


@pytest.mark.parametrize("samplers", ["ki", ["top_k", "top_p", "infill"], ["top_p"], [], "kfyp"])
def test_the_infill_sampler_may_follow_top_k(shared: Llama, samplers: object) -> None:
    """As editors that fill in code ask for it; other samplers are llama.cpp's own."""
    body = {"prompt": "a", "n_predict": 1, "samplers": samplers}
    assert shared.request("POST", "/completion", body)[0] == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/infill"])
@pytest.mark.parametrize("field", ["lora", "id_slot"])
def test_a_field_is_refused_at_every_path(shared: Llama, path: str, field: str) -> None:
    """Also at those whose slots llama.cpp chooses."""
    status, _, data = shared.request("POST", path, {"messages": HELLO, "input": "x", field: [{"id": 0}]})
    assert status == 400
    assert json.loads(data)["error"]["message"].startswith(f"{field}: ")


@pytest.mark.parametrize("path", ["/slots/0?action=erase", "/%73lots/0?action=erase", "/lora-adapters"])
def test_what_would_change_slots_is_forbidden(shared: Llama, path: str) -> None:
    """Also where its path is written in another way."""
    assert shared.request("POST", path, [])[0] == 403


@pytest.mark.parametrize("begin", [b"GET /h\x80 HTTP/1.1", b"GET /health HTTP/1.1\r\nX-A: a\r\n b"])
def test_a_request_that_cannot_be_passed_on_is_refused(shared: Llama, begin: bytes) -> None:
    """A path and a header that HTTP does not allow."""
    host, _, port = shared.address.partition(":")
    with socket.create_connection((host, int(port)), timeout=START_S) as link:
        link.sendall(begin + b"\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert link.recv(100).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("option", ["mmproj.path=x", "ctx_shift=true", "n_cache_reuse=4", "api_prefix=/x"])
def test_a_parameter_that_rows_would_depend_on_is_refused_at_the_start(
    model: Path, tmp_path: Path, option: str
) -> None:
    """With its name, before the model is loaded."""
    llama = Llama(model, ABSENT, tmp_path, "--param", option)
    with suppress(AssertionError), llama:
        pass
    assert llama.process.wait(START_S) == 5
    assert f"param {option.partition('=')[0]}" in llama.log
    assert "Traceback" not in llama.log


NAMES = ["alice@example.com", "a b/c\\d", "Привет, мир", "\U0001f4a5" * 40, "x" * 5000, "a\nb\0c", "sha256:0"]


@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_of_any_name_is_kept(shared: Llama, name: str) -> None:
    """Another conversation has its one slot in between."""
    first = shared.turn(HELLO, name)
    shared.turn(HELLO, "another")
    again = shared.turn(HELLO, name)
    assert again.restored_count == again.cached_count > 0
    assert again.text == first.text


def test_a_name_is_one_in_header_and_body(shared: Llama) -> None:
    """A header has bytes, which mean what they mean in a body."""
    name = "Zoë müßig"
    shared.turn(HELLO, name)
    shared.turn(HELLO, "another")
    headers = {"X-Session-ID": name.encode().decode("latin-1")}
    body = {"messages": HELLO, "max_tokens": 2}
    assert int(shared.request("POST", "/v1/chat/completions", body, headers)[1]["X-Ctxcache-Restored-Tokens"])


def test_a_lone_surrogate_names_a_conversation(shared: Llama) -> None:
    """It is no character, but JSON can write it."""
    for _ in range(2):
        body = {"messages": HELLO, "max_tokens": 2, "session_id": "a\ud800"}
        status, headers, _ = shared.request("POST", "/v1/chat/completions", body)
        assert status == 200
        shared.turn(HELLO, "another")
    assert int(headers["X-Ctxcache-Restored-Tokens"]) > 0


# -- what a reply says of what was restored ---------------------------------------------------------------


def answer(llama: Llama, content: str, session: str, **fields: Any) -> tuple[dict[str, str], bytes]:
    """Headers and body of a reply."""
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0}
    status, headers, data = llama.request(
        "POST", "/v1/chat/completions", body | {"session_id": session} | fields
    )
    assert status == 200, data
    return headers, data


LONG = "Tell me about the rivers of France, and then about its mountains."


@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_header_says_what_llama_used(shared: Llama, is_streamed: bool) -> None:  # noqa: FBT001
    """A state that was put into the slot and has another begin is told as 0."""
    answer(shared, LONG, "used")
    shared.turn(HELLO, "another")
    headers, data = answer(shared, LONG, "used", stream=is_streamed)
    told = int(headers["X-Ctxcache-Restored-Tokens"])
    assert told == int(re.findall(rb'"cache_n":(\d+)', data)[-1]) > 10
    shared.turn(HELLO, "another")
    # Another system's words, so that not even the template's first tokens are those of before.
    body = {"prompt": "Zebras", "n_predict": 2, "session_id": "used", "stream": is_streamed}
    status, headers, data = shared.request("POST", "/completion", body)
    assert (status, headers["X-Ctxcache-Restored-Tokens"]) == (200, "0")
    assert b'"cache_n":0' in data
    assert shared.log.count("'used' was restored in vain") == 1


def test_a_stream_has_the_events_that_its_client_asked_for(shared: Llama) -> None:
    """Events about the prompt's progress are the proxy's own, unless the client wants them."""
    plain = answer(shared, LONG, "events", stream=True)[1]
    for wanted, has_progress in ((False, False), (True, True)):
        shared.turn(HELLO, "another")
        headers, data = answer(shared, LONG, "events", stream=True, return_progress=wanted)
        assert int(headers["X-Ctxcache-Restored-Tokens"]) > 10
        assert (b"prompt_progress" in data) == has_progress
        assert data.rstrip().endswith(b"data: [DONE]")
        said = [re.findall(rb'"content":"(.*?)"', one) for one in (plain, data)]
        assert said[0] == said[1]
        if not wanted:
            assert data.count(b"data: ") == plain.count(b"data: ")


# -- files that others cut ----------------------------------------------------------------------------------


def test_whoever_cuts_the_files_that_lie_there_ends_nothing(
    model: Path, store: ServerProcess, tmp_path: Path
) -> None:
    """Slots' files cannot be cut while they are handed over: they have no names."""
    both = [Conversation(session, subject) for session, subject in SUBJECTS.items()]
    with Llama(model, store.target, tmp_path) as llama:
        llama.wait_for(READY)
        is_over = threading.Event()

        def cut() -> None:
            while not is_over.is_set():
                for path in llama.directory.rglob("*"):
                    with suppress(OSError):
                        path.open("r+").truncate(path.stat().st_size // 2)

        cutter = threading.Thread(target=cut)
        cutter.start()
        try:
            for _ in range(3):
                for conversation in both:
                    reply = conversation.go_on(llama)
        finally:
            is_over.set()
            cutter.join()
        assert reply.restored_count > 0
        assert llama.end() == 0


@pytest.mark.parametrize("end", [0, 1, PART_BYTES, PART_BYTES + 1])
def test_a_file_that_is_cut_while_it_is_saved_is_not_saved(
    keeper: SlotKeeper, store: ServerProcess, tmp_path: Path, end: int
) -> None:
    """It is no signal either, which would end the process."""
    path = tmp_path / "in"
    path.write_bytes(bytes(3 * PART_BYTES))
    file = FileIO(path, "r+")
    store.signal(signal.SIGSTOP)
    try:
        keeper.save("alice", file, 7)
        file.truncate(end)
    finally:
        store.signal(signal.SIGCONT)
    assert keeper.drain(START_S)
    with FileIO(tmp_path / "out", "w+") as out:
        assert keeper.restore("alice", out) == 0


def test_a_damaged_conversation_is_named_once_and_kept_again(
    keeper: SlotKeeper, store: ServerProcess, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each conversation once, not each process once, nor each turn."""
    path, names = tmp_path / "in", ["alice", "bob@example.com"]

    def save(content: bytes) -> None:
        for name in names:
            path.write_bytes(content)
            keeper.save(name, FileIO(path, "r+"), 7)
            assert keeper.drain(START_S)

    save(bytes(2 * PART_BYTES))
    with ctxcache.connect(store.target) as cache, FileIO(tmp_path / "out", "w+") as out:
        for name in names:
            (record,) = cache.blocks.load(SPACE, [SlotKeeper.record_key(name)])
            assert record is not None
            cache.blocks.delete(SPACE, [bytes.fromhex(json.loads(record[0].tobytes())["keys"][1])])
            assert [keeper.restore(name, out) for _ in range(3)] == [0, 0, 0]
        assert keeper.reasons.counts == {"is not restored, not whole": 6}
        for name in names:
            assert caplog.text.count(f"conversation '{name}' is not restored, not whole") == 1
        save(b"next turn")
        assert [keeper.restore(name, out) for name in names] == [7, 7]
