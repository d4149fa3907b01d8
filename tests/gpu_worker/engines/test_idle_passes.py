"""A queue beside an engine computes edited conversations in idle time, and nobody waits for it."""

import re
import threading
import urllib.request
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
from killed_passes import EDITED, FIRST, NEXT, REPLY_TOKENS, engine_on, reference
from server_process import ServerProcess
from transformers import DynamicCache

import ctxcache
from ctxcache.client import Client
from ctxcache.client.types import MissEvent
from ctxcache.errors import InvalidArgument
from gpu_worker.engines.ahead import Ahead
from gpu_worker.engines.next_prompts import Message, next_history
from gpu_worker.engines.transformers import TransformersEngine
from gpu_worker.engines.transformers_turns import Rerendered, Turn
from gpu_worker.families.generation import continue_greedy

WAIT_S = 60.0


@pytest.fixture(autouse=True)
def _nothing_is_there(client: Client) -> None:
    """What another test left would be found by its tokens."""
    for session in client.sessions.list():
        client.sessions.open(session.name).delete()


def _fresh(history: Sequence[int]) -> list[int]:
    kept = DynamicCache(config=reference().config)
    return continue_greedy(
        reference(), kept, [*history, *NEXT], max_new_tokens=REPLY_TOKENS, eos_token_ids=()
    ).token_ids


def _next(engine: TransformersEngine, session_id: str, history: Sequence[int]) -> Turn:
    turn = engine.turn(session_id, NEXT, max_new_tokens=REPLY_TOKENS, history=history, eos_token_ids=())
    assert turn.token_ids == _fresh(history)
    return turn


def test_what_is_offered_is_there_when_the_user_returns(client: Client, session_id: str) -> None:
    """Several conversations, each computed once; the counts say what was used."""
    with engine_on(client) as engine, Ahead(engine, share=1.0) as ahead:
        edits = {f"{session_id}-{number}": [*EDITED[: 250 - number], 7] for number in range(3)}
        for name, history in edits.items():
            engine.turn(name, FIRST, max_new_tokens=0)
            ahead.offer(name, history, return_in=timedelta(seconds=9))
        assert ahead.wait(WAIT_S)
        # The first pass may have been under way when another conversation's turn came.
        assert ahead.outcomes["in place"] == 3
        for name, history in edits.items():
            assert _next(engine, name, history).reused_token_count == len(history)
        counts = engine.ahead
        assert counts.used_token_count > 0
        assert counts.used_token_count + counts.wasted_token_count == counts.computed_token_count
        # Nothing differs now, and a conversation that nobody has is none.
        ahead.offer(session_id + "-0", edits[session_id + "-0"])
        ahead.offer(session_id + "-none", EDITED)
        assert ahead.wait(WAIT_S)
        ended = {name: ahead.outcomes[name] for name in ("in place", "nothing to do", "SESSION_NOT_FOUND")}
        assert ended == {"in place": 3, "nothing to do": 1, "SESSION_NOT_FOUND": 1}


def test_turns_that_come_all_the_time_are_right_and_first(client: Client, session_id: str) -> None:
    """Two users in threads, edits behind each reply: every reply is right, every token counted."""
    with engine_on(client) as engine, Ahead(engine, share=1.0, step_tokens=16) as ahead:
        wrong: list[object] = []

        def user(number: int) -> None:
            try:
                name, history = f"{session_id}-{number}", [*FIRST[: 200 + number]]
                engine.turn(name, history, max_new_tokens=0)
                for cut in (30, 90, 130):
                    history = [*history[:cut], *history[cut + 9 :]]
                    ahead.offer(name, history)
                    history = [*history, *NEXT, *_next(engine, name, history).token_ids]
            except BaseException as error:
                wrong.append(error)
                raise

        users = [threading.Thread(target=user, args=(number,)) for number in range(2)]
        for thread in users:
            thread.start()
        for thread in users:
            thread.join()
        assert not wrong
        assert ahead.wait(WAIT_S)
        counts = engine.ahead
        assert counts.computed_token_count >= counts.used_token_count + counts.wasted_token_count


def test_little_that_differs_is_left_to_the_turn(client: Client, session_id: str) -> None:
    """Two tokens are computed sooner than a pass is begun, which takes some calls of the store."""
    with engine_on(client) as engine, Ahead(engine, share=1.0) as ahead:
        engine.turn(session_id, FIRST, max_new_tokens=0)
        ahead.offer(session_id, [*FIRST[:-2], 7, 8])
        assert ahead.wait(WAIT_S)
        assert ahead.outcomes == {"nothing to do": 1}
        assert engine.ahead.computed_token_count == 0


def test_an_end_waits_for_one_step(client: Client, session_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits is forgotten, and the engine goes on without it."""
    with engine_on(client) as engine:
        begun, closing, rerendered = threading.Event(), threading.Event(), engine.rerendered

        def pausing(*words: Any, goes_on: Callable[[], bool], **named: Any) -> Rerendered:
            def asked() -> bool:
                begun.set()
                closing.wait(WAIT_S)
                return goes_on()

            return rerendered(*words, goes_on=asked, **named)

        monkeypatch.setattr(engine, "rerendered", pausing)
        ahead = Ahead(engine, share=1.0, step_tokens=16)
        engine.turn(session_id, FIRST, max_new_tokens=0)
        ahead.offer(session_id, EDITED)
        assert begun.wait(WAIT_S)
        thread = threading.Thread(target=ahead.close)
        thread.start()
        while not ahead._passes.is_closing:
            closing.wait(0.002)
        closing.set()
        thread.join(WAIT_S)
        assert not thread.is_alive()
        assert ahead.outcomes == {"gave way": 1}
        assert engine.ahead.computed_token_count == 0
        _next(engine, session_id, EDITED)


def test_a_store_that_is_gone_costs_nothing_but_the_pass(
    tmp_path_factory: pytest.TempPathFactory, session_id: str
) -> None:
    """The queue goes on, and later offers are computed when the store is back."""
    with (
        ServerProcess(tmp_path_factory.mktemp("gone") / "data") as server,
        ctxcache.connect(server.target) as client,
        engine_on(client) as engine,
        Ahead(engine, share=1.0) as ahead,
    ):
        engine.turn(session_id, FIRST, max_new_tokens=0)
        assert engine.wait(session_id) is None
        server.kill9()
        ahead.offer(session_id, EDITED)
        assert ahead.wait(WAIT_S)
        assert ahead.outcomes == {"UNAVAILABLE": 1}
        server.start()
        while "in place" not in ahead.outcomes:
            ahead.offer(session_id, EDITED)
            assert ahead.wait(WAIT_S)
        assert _next(engine, session_id, EDITED).reused_token_count == len(EDITED)


def test_an_engine_has_no_steps_of_nothing(client: Client) -> None:
    """Settings are refused by their names."""
    with engine_on(client) as engine, pytest.raises(InvalidArgument, match="step_tokens"):
        Ahead(engine, step_tokens=0)


def _rendered(messages: list[Message], *, is_kept: bool = False) -> list[int]:
    """A template that strips thoughts before the last message of a user, in tokens of one letter."""
    last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    text = ""
    for i, message in enumerate(messages):
        thought = message.get("reasoning_content", "")
        text += f"<{message['role']}>"
        text += f"[{thought}]" if thought and (is_kept or i > last) else ""
        text += f"{message['content']};"
    return [ord(letter) for letter in f"{text}<assistant>"]


@pytest.mark.parametrize("is_kept", [False, True])
def test_the_next_prompt_is_known_before_the_user_writes_it(*, is_kept: bool) -> None:
    """Whatever the next message says: thoughts are gone where the template strips them."""

    def render(messages: list[Message]) -> list[int]:
        return _rendered(messages, is_kept=is_kept)

    said: list[Message] = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi", "reasoning_content": "a greeting"},
    ]
    known = next_history(render, said)
    text = "".join(map(chr, known))
    thought = "[a greeting]" if is_kept else ""
    assert text == f"<user>hello;<assistant>{thought}hi;<user>"
    for content in ("", "bye", "a", "b"):
        assert render([*said, {"role": "user", "content": content}])[: len(known)] == known


def test_the_store_adds_up_what_engines_computed(
    tmp_path_factory: pytest.TempPathFactory, session_id: str
) -> None:
    """Told with passes, and at the end; a store that was gone hears it with what comes."""
    with (
        ServerProcess(tmp_path_factory.mktemp("told") / "data", "--metrics-listen", "127.0.0.1:0") as server,
        ctxcache.connect(server.target) as client,
    ):
        with engine_on(client) as engine:
            engine.turn(session_id, FIRST, max_new_tokens=0)
            assert engine.rerendered(session_id, EDITED).is_in_place
            _next(engine, session_id, EDITED)
            counts = engine.ahead
        assert counts.used_token_count == counts.computed_token_count > 0
        assert _told(server) == (counts.computed_token_count, counts.used_token_count, 0)
        with engine_on(client) as engine:
            assert engine.rerendered(session_id, FIRST).is_in_place
            engine.turn(session_id, NEXT, max_new_tokens=0, history=EDITED)
            wasted = engine.ahead.wasted_token_count
        assert wasted > 0
        assert _told(server)[2] == wasted
        happened = [one.event for one in client.admin.why_miss(f"sessions/{session_id}").happenings]
        assert MissEvent.COMPUTED_IN_VAIN in happened


def _told(server: ServerProcess) -> tuple[int, ...]:
    with urllib.request.urlopen(f"http://{server.ready['metrics_address']}/metrics") as page:
        text = page.read().decode()
    name = r'^ctxcache_tenant_ahead_tokens_total\{tenant="default",what="%s"\} (\S+)$'
    found = [re.search(name % what, text, re.MULTILINE) for what in ("computed", "used", "wasted")]
    return tuple(int(float(one[1])) if one else 0 for one in found)
