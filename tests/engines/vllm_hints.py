"""Requests' hints about conversations in a real vLLM, and its waiting queue: the store hears it, and acts.

Run by `make engines`, in an environment that has vLLM.
"""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ctxcache
from ctxcache.client import Client
from ctxcache.client.types import EngineUse, HintAction, HintKind
from ctxcache.errors import DeadlineExceeded, SessionNotFound
from gpu_worker.engines.vllm.hints import HintTeller
from gpu_worker.engines.vllm.versions import has
from lab.engines.vllm_process import VllmEngine
from tests.engines.vllm_small import model
from tests.server_process import ServerProcess

__all__ = ["model"]

COUNT = 8
SAVED = 96
"""Tokens of a first turn that whole blocks hold."""
METRIC = "vllm:ctxcache_hints"
WAYS = ["parameters", *(["envelope"] if has("hints") else [])]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A store for all that share an engine."""
    with ServerProcess(tmp_path_factory.mktemp("store") / "data") as server:
        yield server


@pytest.fixture(scope="module")
def engine(
    model: Path, store: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmEngine]:
    """An engine that computes one request at a time."""
    log = tmp_path_factory.mktemp("engine") / "log"
    with VllmEngine(model, store.target, log, max_num_seqs=1) as running:
        yield running


@pytest.fixture
def cache(store: ServerProcess) -> Iterator[Client]:
    """A client of the store."""
    with ctxcache.connect(store.target) as client:
        yield client


def prompt_of(number: int, count: int = 97) -> list[int]:
    """Another prompt for each number."""
    return [(11 * number + 5 * i * i) % 500 + 3 for i in range(count)]


def until(what: Callable[[], Any]) -> Any:
    """The answer of `what`, once it is true."""
    deadline_s = time.monotonic() + 30
    while not (found := what()):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return found


def envelope(*actions: tuple[str, dict[str, Any]], version: str = "1") -> dict[str, Any]:
    """An envelope of hints as vLLM defines it."""
    return {
        "protocol_version": "1",
        "message_id": "m",
        "actions": [
            {"action_id": str(i), "action_type": kind, "action_version": version, "payload": payload}
            for i, (kind, payload) in enumerate(actions)
        ],
    }


def hold(engine: VllmEngine, session: str | None, number: int, **more: Any) -> None:
    """One turn of a conversation."""
    engine.ask({"prompt": prompt_of(number), "session": session, "count": COUNT} | more)


def converse(engine: VllmEngine, client: Client, session: str, number: int, **more: Any) -> None:
    """One turn of a conversation, until it is saved and safe."""
    hold(engine, session, number, **more)
    until(lambda: client.sessions.get(f"sessions/{session}").durable_token_count >= SAVED)


def counted(engine: VllmEngine, session: str) -> dict[str, float]:
    """Hints by kind and outcome, as vLLM's metrics have them: they come with its steps."""
    hold(engine, session, 0)
    return engine.metrics(METRIC)


@pytest.mark.parametrize("says", [{"ends": True}, {"ends": False}], ids=["over", "not over"])
def test_a_conversation_that_is_over_is_the_first_to_leave(
    model: Path, tmp_path: Path, says: dict[str, bool]
) -> None:
    """Where room is needed first, one that ended leaves; and not otherwise.

    Then a newcomer does: of those that return, most do so after some 20 s.
    """
    sizes = ("--ssd-size-bytes", str(2 << 20), "--arena-size-bytes", str(1 << 20))
    with (
        ServerProcess(tmp_path / "data", *sizes) as server,
        VllmEngine(model, server.target, tmp_path / "log") as engine,
        ctxcache.connect(server.target) as cache,
    ):
        converse(engine, cache, "older", 0)
        converse(engine, cache, "over", 1, says=says)
        if says["ends"]:
            until(lambda: counted(engine, "older").get("expect/accepted"))
        for number in range(2, 40):
            converse(engine, cache, f"new-{number}", number)
            left = {one.name.removeprefix("sessions/") for one in cache.sessions.list()}
            gone = {"older", "over", *(f"new-{one}" for one in range(2, number + 1))} - left
            if gone:
                break
        assert gone
        assert ("over" in gone) is says["ends"]
        assert gone == {"over"} or not says["ends"]


def test_a_conversation_that_is_over_may_go_on_nevertheless(engine: VllmEngine, cache: Client) -> None:
    """It is a hint and no more: what was said is restored."""
    converse(engine, cache, "regret", 30, says={"ends": True})
    assert engine.turn([*prompt_of(30), *prompt_of(31, 20)], "regret", COUNT).cached_count == SAVED


@pytest.mark.parametrize("way", WAYS)
def test_hints_of_a_request_reach_the_store(engine: VllmEngine, cache: Client, way: str) -> None:
    """About another conversation at once, about its own once it is saved; what came of each is counted."""
    other, own = f"other-{way}", f"own-{way}"
    converse(engine, cache, other, 40)
    before = counted(engine, other)

    def give(**more: Any) -> None:
        hints = envelope(*more.pop("actions"), **more)
        said = {"hints": hints} if way == "envelope" else {"says": {"kv_hints": hints}}
        hold(engine, own, 41, **said)

    give(
        actions=[
            ("demote", {"session": other}),
            ("retain", {"ttl_s": 60.0, "priority": 7}),
            ("expect", {"return_in_s": 30}),
            ("prefetch", {"session": "nobody"}),
            ("expect", {"return_in_s": 30.0, "ended": True}),
            ("retain", {"ttl": 60}),
            ("pin", {"session": other, "ttl_s": "long"}),
            ("pin", {"session": "no id/of a session", "ttl_s": 1.0}),
            ("pin", {"session": other, "ttl_s": 1e15}),
            ("another_component", {"anything": 1}),
        ]
    )
    give(actions=[("share", {})], version="2")
    expected = {
        "demote/accepted": 1,
        "retain/accepted": 1,
        "expect/accepted": 1,
        "prefetch/missing": 1,
        "expect/invalid": 1,
        "retain/invalid": 1,
        "pin/invalid": 2,
        "pin/missing": 1,
        "other/ignored": 1,
        "share/invalid": 1,
    }

    def news() -> dict[str, float]:
        after = counted(engine, other)
        return {
            key: value - before.get(key, 0) for key, value in after.items() if value != before.get(key, 0)
        }

    until(lambda: sum(news().values()) >= sum(expected.values()))
    assert news() == expected
    assert "payload: 'ttl' is not one of session" in engine.log
    assert "action_version '2' is not '1'" in engine.log


def test_what_nobody_can_be_told_is_counted(engine: VllmEngine) -> None:
    """Hints about what has no name and is not saved, and those beyond what a request may have."""
    before = counted(engine, "some")
    hold(engine, None, 50, prompt=prompt_of(50, 40), says={"ends": True})
    many = envelope(*[("release", {"session": "some"})] * 40)
    hold(engine, "some", 0, hints=many)
    until(
        lambda: counted(engine, "some").get("release/accepted", 0) - before.get("release/accepted", 0) == 32
    )
    after = counted(engine, "some")
    assert after["expect/unsent"] - before.get("expect/unsent", 0) == 1
    assert after["other/unsent"] - before.get("other/unsent", 0) == 8


def test_requests_that_wait_are_a_queue_of_the_store(engine: VllmEngine, cache: Client) -> None:
    """While one is computed the store knows who comes next; when all have run nobody waits."""
    requests = [{"prompt": prompt_of(60 + i), "session": f"waits-{i}", "count": 100} for i in range(4)]
    seen: list[EngineUse] = []
    asking = threading.Thread(target=engine.ask, args=requests)
    asking.start()
    while asking.is_alive():
        seen += cache.admin.list_engines()
        time.sleep(0.005)
    asking.join()
    assert {one.engine.partition("-")[0] for one in seen} == {"vllm"}
    waiting = [one.waiting_count for one in seen]
    assert {1, 2, 3} <= set(waiting)
    assert until(lambda: [one.waiting_count for one in cache.admin.list_engines()] == [0])
    with pytest.raises(SessionNotFound):
        cache.sessions.get("sessions/waits-4")


def test_the_end_waits_for_one_answer_of_a_store_that_hangs() -> None:
    """A thousand hints may wait, and each would take its time-out."""
    asked, is_late = threading.Event(), threading.Event()
    times = 0

    class Hanging:
        """A link to a store that takes every call's time."""

        hints = property(lambda self: self)

        def use(self) -> tuple[Any, None]:
            return self, None

        def give(self, _actions: list[HintAction]) -> None:
            nonlocal times
            times += 1
            asked.set()
            is_late.wait(60)
            raise DeadlineExceeded(target="it", timeout_s="1")

    link: Any = Hanging()
    teller = HintTeller(link)
    teller.tell([HintAction(HintKind.PREFETCH, "sessions/s")] * 20)
    assert asked.wait(60)
    ends = threading.Thread(target=teller.close)
    ends.start()
    while not teller._is_closing:
        time.sleep(0.001)
    is_late.set()
    ends.join(60)

    assert times == 1
    assert sum(teller.take_counts().values()) == 20
