"""An engine's link to a real store: kept, broken, made again, and refused for good."""

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import ServerProcess
from tiny_models import build

import ctxcache
from ctxcache.client import CallerModel, Client
from ctxcache.errors import CacheError, DeadlineExceeded, Unavailable
from ctxcache.format.model import ModelSpec, with_version
from gpu_worker.engines import link as link_module
from gpu_worker.engines.link import Bringing, LinkState, StoreLink
from gpu_worker.model.spec import model_spec

TIMEOUT_S = 30


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ServerProcess]:
    """A store that a test may stop."""
    with ServerProcess(tmp_path / "data") as server:
        yield server


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    """A model."""
    return model_spec(build("llama"), model_id="linked")


def link_to(target: str, spec: ModelSpec) -> StoreLink[CallerModel]:
    """A link for a model."""

    def register(client: Client) -> CallerModel:
        return client.models.register(spec)

    return StoreLink(lambda: ctxcache.connect(target, timeout_s=1.0), register)


def ask(link: StoreLink[CallerModel]) -> None:
    """A call over the link, whose failure it hears of."""
    use = link.use()
    assert use is not None
    client, model = use
    try:
        client.models.get(model.name)
    except CacheError as error:
        link.failed(error)


def _is_ready(link: StoreLink[CallerModel]) -> bool:
    """Whether it is; asked anew each time, which a type checker does not see of the property."""
    return link.state is LinkState.READY


def test_a_store_that_goes_and_comes_back_is_used_again(store: ServerProcess, spec: ModelSpec) -> None:
    """Between the failed call and the next try nothing is asked of it."""
    link = link_to(store.target, spec)
    try:
        assert link.wait(TIMEOUT_S) is LinkState.READY
        ask(link)
        assert link.state is LinkState.READY
        store.kill9()
        ask(link)
        assert link.use() is None
        store.start()
        assert link.wait(TIMEOUT_S) is LinkState.READY
        ask(link)
        assert link.state is LinkState.READY
    finally:
        link.close()


def test_a_store_that_comes_back_empty_is_told_the_model_again(
    store: ServerProcess, spec: ModelSpec, tmp_path: Path
) -> None:
    """Another disk, or a directory that was removed: the first refused call says so, and it is used again."""
    link = link_to(store.target, spec)
    try:
        assert link.wait(TIMEOUT_S) is LinkState.READY
        store.terminate()
        with ServerProcess(tmp_path / "empty", "--listen", store.target):
            while _is_ready(link):
                ask(link)
            assert link.wait(TIMEOUT_S) is LinkState.READY
            ask(link)
            assert _is_ready(link)
            with ctxcache.connect(store.target) as client:
                assert client.models.get("models/linked")
    finally:
        link.close()


def test_a_store_that_starts_later_is_found(store: ServerProcess, spec: ModelSpec) -> None:
    """An engine may start first."""
    store.kill9()
    link = link_to(store.target, spec)
    try:
        assert link.wait(1.5) in (LinkState.CONNECTING, LinkState.RESTING)
        store.start()
        assert link.wait(TIMEOUT_S) is LinkState.READY
    finally:
        link.close()


def test_an_outage_is_told_once(
    store: ServerProcess, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However often the store is asked in vain: a warning each time would fill the engine's log."""
    monkeypatch.setattr("gpu_worker.engines.link.PAUSE_S", 0.001)
    problems = [Unavailable(target=store.target, problem="nobody listens") for _ in range(3)]

    def register(client: Client) -> CallerModel:
        if problems:
            raise problems.pop()
        return client.models.register(spec)

    with caplog.at_level("INFO", "gpu_worker.engines.link"):
        link = StoreLink(lambda: ctxcache.connect(store.target), register)
        assert link.wait(TIMEOUT_S) is LinkState.READY
        link.close()
    said = [record.getMessage() for record in caplog.records]
    assert len([one for one in said if "cannot be used yet" in one]) == 1
    assert said[-1] == "the context store is used"


def test_a_store_with_another_model_is_refused_for_good(store: ServerProcess, spec: ModelSpec) -> None:
    """Nothing is tried again, and closing does not hang."""
    other = build("neox")
    with ctxcache.connect(store.target) as client:
        client.models.register(model_spec(other, model_id="linked"))
    link = link_to(store.target, spec)
    assert link.wait(TIMEOUT_S) is LinkState.REFUSED
    link.failed(Unavailable(target=store.target, problem="nobody listens"))
    assert link.state is LinkState.REFUSED
    assert link.use() is None
    link.close()


def test_a_store_that_hangs_is_noticed_by_who_waits_for_it(store: ServerProcess, spec: ModelSpec) -> None:
    """Calls that move rows may take long: a short question tells a slow store from one that hangs."""
    now_s = [100.0]

    def register(client: Client) -> CallerModel:
        return client.models.register(spec)

    link = StoreLink(
        lambda: ctxcache.connect(store.target, timeout_s=600.0),
        register,
        lambda client, model: client.models.get(model.name),
        clock=lambda: now_s[0],
    )
    try:
        assert link.wait(TIMEOUT_S) is LinkState.READY
        begun_s = now_s[0]
        # Asked for as long as it likes: it answers each time, and is used.
        for _ in range(50):
            now_s[0] += 1.0
            assert link.answers(begun_s, 2.0)
            while link._asked_s is not None:
                time.sleep(0.001)
        store.signal(signal.SIGSTOP)
        now_s[0] += 1.0
        assert link.answers(begun_s, 2.0)
        now_s[0] += 2.0
        assert link.answers(begun_s, 2.0)
        now_s[0] += 0.1
        assert not link.answers(begun_s, 2.0)
        assert link.use() is None
        # Nor for one who has just begun to wait.
        assert not link.answers(now_s[0], 2.0)
    finally:
        store.signal(signal.SIGCONT)
        link.close()


def test_a_store_that_hangs_is_not_ready(store: ServerProcess) -> None:
    """Also where its subject is described without a call: no engine's request is what finds it out."""

    def ask(client: Client, _subject: str) -> None:
        list(client.models.list())

    store.signal(signal.SIGSTOP)
    connected = ctxcache.connect(store.target, timeout_s=1.0)
    link = StoreLink(lambda: connected, lambda _client: "described without a call", ask)
    try:
        while (state := link.state) is LinkState.CONNECTING:
            time.sleep(0.001)
        assert state is LinkState.RESTING
        store.signal(signal.SIGCONT)
        assert link.wait(TIMEOUT_S) is LinkState.READY
    finally:
        store.signal(signal.SIGCONT)
        link.close()


def test_memory_that_was_taken_back_is_not_written_to() -> None:
    """The owner waits for a write that is under way; the next one raises."""
    bringing, owned = Bringing("chunks"), threading.Event()

    def take_back() -> None:
        bringing.give_up()
        owned.set()

    owner = threading.Thread(target=take_back)
    with bringing.writing():
        owner.start()
        assert not owned.is_set()
    owner.join()
    with pytest.raises(DeadlineExceeded, match="chunks"), bringing.writing():
        pytest.fail("written")


def test_closing_does_not_wait_for_a_pause(spec: ModelSpec) -> None:
    """A link that rests ends at once."""
    link = link_to("127.0.0.1:1", spec)
    while link.state is not LinkState.RESTING:
        time.sleep(0.01)
    link.close()
    assert link.use() is None


def test_an_end_does_not_wait_until_the_weights_are_read(
    store: ServerProcess, spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large ones take minutes. The thread that reads them ends the client's connection itself, afterwards."""
    monkeypatch.setattr(link_module, "CLOSE_S", 0.01)
    is_reading, is_read, clients = threading.Event(), threading.Event(), list[Client]()

    def register(client: Client) -> CallerModel:
        clients.append(client)
        is_reading.set()
        is_read.wait()
        return client.models.register(spec)

    link = StoreLink(lambda: ctxcache.connect(store.target), register)
    is_reading.wait()
    closing = threading.Thread(target=link.close, daemon=True)
    closing.start()
    closing.join(TIMEOUT_S)
    is_closed = not closing.is_alive()
    [client] = clients
    assert list(client.models.list()) == []
    is_read.set()
    link._thread.join()

    assert is_closed
    assert link.use() is None
    with pytest.raises(Unavailable):
        list(client.models.list())


def test_a_subject_that_becomes_another_one_is_described_before_the_store_is_used(
    store: ServerProcess, spec: ModelSpec
) -> None:
    """Also one that becomes another while it is described, and one that there is not for a while."""
    version, described = ["a"], threading.Semaphore(0)
    goes_on = threading.Semaphore(1)

    def register(client: Client) -> CallerModel:
        named = with_version(spec, version[0])
        described.release()
        assert goes_on.acquire(timeout=TIMEOUT_S)
        return client.models.register(named)

    link = StoreLink(lambda: ctxcache.connect(store.target, timeout_s=1.0), register)
    try:
        assert link.wait(TIMEOUT_S) is LinkState.READY
        assert described.acquire(timeout=TIMEOUT_S)
        version[0] = "b"
        link.renew()
        assert link.use() is None
        # It is described as b, which it is not any more.
        assert described.acquire(timeout=TIMEOUT_S)
        version[0] = "c"
        link.renew()
        goes_on.release(2)
        assert link.wait(TIMEOUT_S) is LinkState.READY
        use = link.use()
        assert use is not None
        assert use[1].spec == with_version(spec, "c")
        link.renew(is_wanted=False)
        assert link.use() is None
        assert link.wait(TIMEOUT_S) is LinkState.CONNECTING
        goes_on.release()
        version[0] = ""
        link.renew()
        assert link.wait(TIMEOUT_S) is LinkState.READY
        use = link.use()
        assert use is not None
        assert use[1].spec == spec
    finally:
        goes_on.release(9)
        link.close()
