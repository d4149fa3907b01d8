"""Edited conversations that are computed ahead of their turns, on a real store.

Every reply is that of an engine without a cache, whatever was stripped, killed, deleted or written meanwhile.
"""

import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hybrids import hybrid_adapter
from killed_passes import (
    CHILD,
    EDITED,
    FIRST,
    NEXT,
    REPLY_TOKENS,
    STEP_TOKENS,
    engine_on,
    model,
    reference,
    spec,
)
from server_process import ServerProcess
from tiny_models import build
from transformers import DynamicCache, PreTrainedModel
from worker_process import nursery

import ctxcache
from ctxcache.client import Client
from ctxcache.client.types import SessionInfo, seconds
from ctxcache.client.wire import Wire
from ctxcache.errors import InvalidArgument, SessionNotFound
from ctxcache.format.streams import StateKind, Stream
from gpu_worker.engines.renderings import LEFT_TTL, WORKING_TTL
from gpu_worker.engines.transformers import TransformersEngine
from gpu_worker.engines.transformers_batch import TransformersBatchEngine, TurnRequest
from gpu_worker.engines.transformers_turns import Rerendered, Turn
from gpu_worker.families.generation import continue_greedy
from gpu_worker.model.spec import model_spec
from gpu_worker.planning.ahead import AheadCounts
from gpu_worker.planning.plan import Method, RestorePlan
from tests.nursery import without_settings


@pytest.fixture(autouse=True)
def _nothing_is_there(client: Client) -> None:
    """What another test left would be found by its tokens."""
    _forget(client)


def _forget(client: Client) -> None:
    for session in client.sessions.list():
        client.sessions.open(session.name).delete()


def _fresh(of: PreTrainedModel, history: Sequence[int], new_ids: Sequence[int]) -> list[int]:
    """The reply of an engine that prefills everything."""
    kept = DynamicCache(config=of.config)
    return continue_greedy(
        of, kept, [*history, *new_ids], max_new_tokens=REPLY_TOKENS, eos_token_ids=()
    ).token_ids


@cache
def _expected(history: tuple[int, ...]) -> list[int]:
    return _fresh(reference(), history, NEXT)


def _begun(engine: TransformersEngine, session_id: str, history: Sequence[int] = FIRST) -> None:
    """A conversation of these tokens."""
    engine.turn(session_id, history, max_new_tokens=0)
    assert engine.wait(session_id) is None


def _next(engine: TransformersEngine, session_id: str, history: Sequence[int]) -> Turn:
    """The turn after that, whose reply is right."""
    turn = engine.turn(session_id, NEXT, max_new_tokens=REPLY_TOKENS, history=history, eos_token_ids=())
    assert engine.wait(session_id) is None
    assert turn.token_ids == _expected(tuple(history))
    return turn


def _tokens(client: Client, session_id: str) -> list[int]:
    handle = client.sessions.open(f"sessions/{session_id}", client.models.register(spec()))
    return handle.token_ids()[1]


def _names(client: Client) -> set[str]:
    return {session.name.removeprefix("sessions/") for session in client.sessions.list()}


def _found(client: Client, history: Sequence[int]) -> int:
    """How many of these tokens any session has, with a name or without."""
    layout = [Stream(layer, StateKind.KV) for layer in range(spec().layer_count)]
    return client.prefixes.match(client.models.register(spec()), history, layout=layout).token_count


@pytest.mark.parametrize("method", [Method.KV, Method.HIDDEN, Method.TOKENS])
def test_what_was_stripped_costs_the_next_turn_nothing(
    client: Client, session_id: str, method: Method
) -> None:
    """The next turn finds all of the new rendering; its session keeps its name, and its time of access."""
    with engine_on(client, method) as engine:
        _begun(engine, session_id)
        before = client.sessions.get(f"sessions/{session_id}")
        done = engine.rerendered(session_id, EDITED)
        after = client.sessions.get(f"sessions/{session_id}")
        counts = engine.ahead
        turn = _next(engine, session_id, EDITED)
        used = engine.ahead

    common = next(i for i, pair in enumerate(zip(FIRST, EDITED, strict=False)) if pair[0] != pair[1])
    computed = len(EDITED) - common
    assert done == Rerendered(len(EDITED), common, computed, is_in_place=True)
    assert (after.token_count, after.access_time_ns) == (len(EDITED), before.access_time_ns)
    assert (turn.reused_token_count, turn.prefilled_token_count) == (len(EDITED), len(NEXT))
    assert (turn.ahead_token_count, turn.miss_reason) == (computed, "")
    # To the token: nothing that was there is computed again.
    assert counts == AheadCounts(computed, 0, 0)
    assert used == AheadCounts(computed, computed, 0)


@pytest.mark.parametrize("name", ["gemma3", "deepseek", "opt"])
def test_other_models_are_edited_as_well(client: Client, session_id: str, name: str) -> None:
    """Windows, latents, learned positions: none of them moves a row."""
    other = build(name)
    plan = RestorePlan.uniform(Method.LATENT if name == "deepseek" else Method.KV, 3)
    with TransformersEngine(other, client, model_spec(other, model_id=f"edited-{name}"), plan) as engine:
        engine.turn(session_id, FIRST, max_new_tokens=0)
        assert engine.rerendered(session_id, EDITED, step_tokens=40).is_in_place
        turn = engine.turn(session_id, NEXT, max_new_tokens=REPLY_TOKENS, history=EDITED, eos_token_ids=())

    assert turn.reused_token_count == len(EDITED)
    assert turn.token_ids == _fresh(other, EDITED, NEXT)


@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1"])
def test_states_come_back_at_any_token(client: Client, session_id: str, name: str) -> None:
    """A hybrid needs no checkpoint where its conversation is cut."""
    adapter = hybrid_adapter(name)
    plan = RestorePlan.uniform(Method.HIDDEN, len(adapter.layers))
    ids = random.Random(5).choices(range(3, 60), k=230)
    edited = [*ids[:101], *ids[141:]]
    own = model_spec(adapter.model, model_id=f"edited-{name}")
    with TransformersEngine(adapter.model, client, own, plan, snapshot_every=64) as engine:
        engine.turn(session_id, ids, max_new_tokens=0)
        assert engine.rerendered(session_id, edited).is_in_place
        turn = engine.turn(session_id, NEXT, max_new_tokens=REPLY_TOKENS, history=edited, eos_token_ids=())

    assert turn.reused_token_count == len(edited)
    assert turn.token_ids == _fresh(adapter.model, edited, NEXT)


def test_switching_back_finds_the_earlier_rendering(client: Client, session_id: str) -> None:
    """Three times to and fro: whole runs of 64 of what there was before, also in a batch."""
    with engine_on(client) as engine:
        _begun(engine, session_id)
        engine.rerendered(session_id, EDITED)
        for history in (FIRST, EDITED, FIRST):
            turn = _next(engine, session_id, history)
            assert turn.reused_token_count >= len(history) // 64 * 64
            assert turn.miss_reason == ""
    plan = RestorePlan.uniform(Method.KV, spec().layer_count)
    with TransformersBatchEngine(model(), client, spec(), plan) as batch:
        asked = TurnRequest(session_id, NEXT, REPLY_TOKENS, history=EDITED, eos_token_ids=())
        (turn,) = batch.turns([asked])

    assert turn.token_ids == _expected(tuple(EDITED))
    assert turn.reused_token_count >= len(EDITED) // 64 * 64


def test_so_many_former_renderings_stay_as_the_engine_says(client: Client, session_id: str) -> None:
    """The oldest goes for the one that comes, and none of them has a name."""
    renderings = [[*FIRST[:70], *[number] * 70] for number in range(5, 11)]
    with engine_on(client, renderings=2) as engine:
        _begun(engine, session_id)
        for edited in renderings:
            assert engine.rerendered(session_id, edited).is_in_place
        assert _names(client) == {session_id}
        assert [_found(client, edited) for edited in renderings] == [64, 64, 64, 128, 128, 128]
        assert _next(engine, session_id, renderings[-2]).reused_token_count >= 128
        # Four renderings ago: gone.
        assert _next(engine, session_id, renderings[0]).reused_token_count == 70
    with engine_on(client, renderings=0) as engine:
        _begun(engine, f"{session_id}-none")
        assert engine.rerendered(f"{session_id}-none", EDITED).is_in_place
        assert _found(client, FIRST) == 128
    for wrong in (-1, 17):
        with pytest.raises(InvalidArgument, match="renderings"):
            engine_on(client, renderings=wrong)


def test_a_conversation_that_is_deleted_leaves_no_rendering(client: Client, session_id: str) -> None:
    """Neither the one that it had nor one that it had before, whatever their names would be."""
    with engine_on(client) as engine:
        _begun(engine, session_id)
        assert engine.rerendered(session_id, EDITED).is_in_place
        assert (_found(client, FIRST), _found(client, EDITED)) == (256, 256)
        client.sessions.open(f"sessions/{session_id}").delete()
        assert (_found(client, FIRST), _found(client, EDITED)) == (0, 0)
        assert _next(engine, session_id, FIRST).reused_token_count == 0


@pytest.mark.parametrize(
    ("history", "common"),
    [(FIRST, len(FIRST)), (FIRST[:100], 100), ([], 0)],
    ids=["equal", "shorter", "empty"],
)
def test_where_nothing_differs_nothing_is_done(
    client: Client, session_id: str, history: list[int], common: int
) -> None:
    """An equal history, a shorter one, none: the session stays, and nothing is computed."""
    with engine_on(client) as engine:
        _begun(engine, session_id)
        before, names = client.sessions.get(f"sessions/{session_id}"), _names(client)
        assert engine.rerendered(session_id, history) == Rerendered(len(history), common)
        refused = engine.rerendered(session_id, EDITED, is_worth=lambda _spared, _cost: False)
        assert (refused.is_in_place, refused.computed_token_count) == (False, 0)
        assert client.sessions.get(f"sessions/{session_id}") == before
        assert _names(client) == names
        assert _next(engine, session_id, FIRST).reused_token_count == len(FIRST)


def test_a_longer_history_is_computed_ahead_too(client: Client, session_id: str) -> None:
    """What a template adds behind a reply, or a tool that has answered."""
    longer = [*FIRST, *range(40, 60)]
    with engine_on(client) as engine:
        _begun(engine, session_id)
        assert engine.rerendered(session_id, longer).is_in_place
        assert _next(engine, session_id, longer).reused_token_count == len(longer)


def test_what_cannot_be_is_refused_and_changes_nothing(client: Client, session_id: str) -> None:
    """A history beyond the context, a step of nothing, no name; no session, and another model's."""
    with engine_on(client) as engine:
        _begun(engine, session_id)
        before = client.sessions.get(f"sessions/{session_id}")
        for name, history, step_tokens, field in (
            (session_id, [5] * 513, STEP_TOKENS, "history"),
            (session_id, EDITED, 0, "step_tokens"),
            ("", EDITED, STEP_TOKENS, "session_id"),
        ):
            with pytest.raises(InvalidArgument, match=field):
                engine.rerendered(name, history, step_tokens=step_tokens)
        names = _names(client)
        assert engine.rerendered(f"{session_id}-none", EDITED).reason == "SESSION_NOT_FOUND"
        other = build("qwen2")
        plan = RestorePlan.uniform(Method.KV, 3)
        with TransformersEngine(other, client, model_spec(other, model_id="another"), plan) as another:
            assert another.rerendered(session_id, EDITED).reason == "MODEL_FINGERPRINT_MISMATCH"
        assert _names(client) == names
        assert client.sessions.get(f"sessions/{session_id}") == before


def test_a_full_context_is_a_history_as_others(client: Client, session_id: str) -> None:
    """As many tokens as the window has."""
    with engine_on(client, window=len(EDITED)) as engine:
        _begun(engine, session_id, FIRST[: len(EDITED)])
        assert engine.rerendered(session_id, EDITED).is_in_place
    with engine_on(client) as engine:
        assert _next(engine, session_id, EDITED).reused_token_count == len(EDITED)


def _at_step(actions: dict[int, Callable[[], object]]) -> Callable[[], bool]:
    """Do something before steps of these numbers, counted from 0; the pass goes on."""
    steps = count()

    def goes_on() -> bool:
        actions.get(next(steps), lambda: None)()
        return True

    return goes_on


_READ: list[Any] = []


def _read(client: Client, name: str) -> None:
    """As a reader that goes on."""
    _READ.append(client.sessions.open(name, client.models.register(spec())).read())


MEANWHILE: dict[str, tuple[Callable[[Client, str], object], str, list[int] | None]] = {
    "appended": (lambda client, name: _append(client, name, [7, 7]), "GENERATION_MISMATCH", [*FIRST, 7, 7]),
    "cut": (
        lambda client, name: client.sessions.open(name).keep_first(90), "GENERATION_MISMATCH", FIRST[:90],
    ),
    "deleted": (lambda client, name: client.sessions.open(name).delete(), "SESSION_NOT_FOUND", None),
    "expired": (
        lambda client, name: client.sessions.open(name).update(ttl=seconds(1)), "SESSION_NOT_FOUND", None,
    ),
    "read": (_read, "SESSION_IN_USE", FIRST),
}  # fmt: skip


def _append(client: Client, name: str, ids: list[int]) -> None:
    """As another engine does, of a model of its own."""
    plan = RestorePlan.uniform(Method.KV, spec().layer_count)
    with TransformersEngine(build("llama"), client, spec(), plan) as other:
        other.turn(name.removeprefix("sessions/"), ids, max_new_tokens=0)


@pytest.mark.parametrize("what", MEANWHILE)
def test_a_conversation_that_went_on_stays_as_it_is(client: Client, session_id: str, what: str) -> None:
    """What was computed for its former rendering is counted as wasted, and nothing of it stays."""
    act, reason, left = MEANWHILE[what]
    name = f"sessions/{session_id}"
    with engine_on(client) as engine:
        _begun(engine, session_id)
        names = _names(client)
        actions: dict[int, Callable[[], object]] = {2: lambda: act(client, name)}
        if what == "expired":
            actions[3] = lambda: _wait_until_gone(client, name)
        done = engine.rerendered(session_id, EDITED, step_tokens=STEP_TOKENS, goes_on=_at_step(actions))
        while _READ:
            _READ.pop().close()
        assert (done.reason, done.is_in_place) == (reason, False)
        counts = engine.ahead
        assert counts.wasted_token_count == counts.computed_token_count > 0
        assert _names(client) <= names
        if left is None:
            with pytest.raises(SessionNotFound):
                client.sessions.get(name)
        else:
            assert _tokens(client, session_id) == left
        _next(engine, session_id, EDITED)


def _wait_until_gone(client: Client, name: str) -> None:
    """A session whose time has come is none, whenever upkeep removes it."""
    pause = threading.Event()
    with suppress(SessionNotFound):
        while client.sessions.get(name):
            pause.wait(0.05)


@pytest.mark.parametrize("is_same", [True, False], ids=["its own turn", "another's turn"])
def test_a_turn_that_comes_in_the_middle_waits_for_one_step(
    client: Client, session_id: str, *, is_same: bool
) -> None:
    """It has the model behind the step; what was computed by then is used where it agrees."""
    turns: list[Turn] = []
    with engine_on(client) as engine:
        _begun(engine, session_id)
        _begun(engine, f"{session_id}-2", FIRST[:40])
        asked = session_id if is_same else f"{session_id}-2"
        history = EDITED if is_same else FIRST[:40]
        thread = threading.Thread(target=lambda: turns.append(_next(engine, asked, history)))

        def come() -> None:
            thread.start()
            _until(lambda: engine._precedence.is_wanted)

        done = engine.rerendered(session_id, EDITED, step_tokens=STEP_TOKENS, goes_on=_at_step({3: come}))
        thread.join()
        (turn,) = turns
        # Behind the step in which it came.
        # It is found by whole runs of 64.
        kept_count = (done.common_token_count + 4 * STEP_TOKENS) // 64 * 64
        assert (done.gave_way, done.is_in_place, done.computed_token_count) == (True, False, 4 * STEP_TOKENS)
        assert engine.ahead.computed_token_count == 4 * STEP_TOKENS
        if is_same:
            assert turn.reused_token_count == kept_count == done.common_token_count + turn.ahead_token_count
            assert not _unfinished(client)
        else:
            later = _next(engine, session_id, EDITED)
            assert later.ahead_token_count == kept_count - done.common_token_count


def test_a_pass_that_gave_way_goes_on_where_it_was(client: Client, session_id: str) -> None:
    """The second one finds what the first had computed, and leaves no session but the conversation's."""
    with engine_on(client) as engine:
        _begun(engine, session_id)
        steps = iter([True, True, True, True, True])
        first = engine.rerendered(
            session_id, EDITED, step_tokens=STEP_TOKENS, goes_on=lambda: next(steps, False)
        )
        assert (first.gave_way, first.computed_token_count) == (True, 5 * STEP_TOKENS)
        # It may be a while until nobody asks for anything.
        assert [session.ttl_ns for session in _unfinished(client)] == [LEFT_TTL.total_seconds() * 10**9]
        second = engine.rerendered(session_id, EDITED, step_tokens=STEP_TOKENS)
        assert second.is_in_place
        found_count = (first.common_token_count + 5 * STEP_TOKENS) // 64 * 64
        assert second.computed_token_count == len(EDITED) - found_count
        assert not _unfinished(client)
        turn = _next(engine, session_id, EDITED)
        used = len(EDITED) - first.common_token_count
        computed = 5 * STEP_TOKENS + second.computed_token_count
        assert turn.ahead_token_count == used
        assert engine.ahead == AheadCounts(computed, used, computed - used)


def _unfinished(client: Client) -> list[SessionInfo]:
    """Renderings under way: the store named them, and they expire soon."""
    soon = [int(ttl.total_seconds() * 10**9) for ttl in (WORKING_TTL, LEFT_TTL)]
    return [session for session in client.sessions.list() if session.ttl_ns in soon]


def _until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    while not condition():
        pause.wait(0.002)


def test_a_pass_gives_way_to_a_turn_of_another_engine_of_the_model(client: Client, session_id: str) -> None:
    """Else each would capture the other's rows, and save those that have the same shape."""
    with engine_on(client) as one, engine_on(client) as other:
        _begun(one, session_id)
        history = [*EDITED[:200], *[7] * 30]
        turn = threading.Thread(target=lambda: _begun(other, f"{session_id}-2", history))

        def come() -> None:
            turn.start()
            _until(lambda: one._precedence.is_wanted or not turn.is_alive())

        done = one.rerendered(session_id, EDITED, step_tokens=STEP_TOKENS, goes_on=_at_step({2: come}))
        turn.join()
        assert done.gave_way
        assert one.rerendered(session_id, EDITED).is_in_place
        _next(one, session_id, EDITED)
        assert _next(other, f"{session_id}-2", history).reused_token_count == len(history)


def test_a_turn_within_a_turn_is_refused(client: Client, session_id: str) -> None:
    """It would wait for itself, for ever; the outer turn goes on."""
    with engine_on(client) as one, engine_on(client) as other:

        def come(_token: int) -> None:
            for engine in (one, other):
                with pytest.raises(InvalidArgument, match="model"):
                    engine.turn(f"{session_id}-2", FIRST, max_new_tokens=0)
                with pytest.raises(InvalidArgument, match="model"):
                    engine.rerendered(session_id, EDITED)

        turn = one.turn(session_id, FIRST, max_new_tokens=2, eos_token_ids=(), on_token=come)
        assert len(turn.token_ids) == 2


def test_two_engines_that_do_the_same_pass(server: ServerProcess, client: Client, session_id: str) -> None:
    """The first one has it; the other's is refused, and every reply is right."""
    # Of a model each: of one model a turn would wait for the pass.
    plan = RestorePlan.uniform(Method.KV, spec().layer_count)
    with (
        ctxcache.connect(server.target) as second,
        engine_on(client) as one,
        TransformersEngine(build("llama"), second, spec(), plan) as other,
    ):
        _begun(one, session_id)
        done: list[Rerendered] = []
        goes_on = _at_step({1: lambda: done.append(other.rerendered(session_id, EDITED))})
        done.append(one.rerendered(session_id, EDITED, step_tokens=STEP_TOKENS, goes_on=goes_on))
        assert [(each.is_in_place, each.reason) for each in done] == [
            (True, ""), (False, "GENERATION_MISMATCH"),
        ]  # fmt: skip
        assert _tokens(client, session_id) == EDITED
        for engine in (one, other):
            _next(engine, session_id, EDITED)


def test_a_pass_in_a_store_that_is_full(tmp_path_factory: pytest.TempPathFactory, session_id: str) -> None:
    """It ends with a reason or takes the place; the turn behind it is right either way."""
    directory = tmp_path_factory.mktemp("full") / "data"
    sizes = ("--arena-size-bytes", "2MiB", "--ssd-size-bytes", "2MiB")
    with (
        ServerProcess(directory, *sizes) as server,
        ctxcache.connect(server.target) as client,
        engine_on(client) as engine,
    ):
        for number in range(8):
            conversation = f"{session_id}-{number}"
            first = [*FIRST, *[number + 5] * 90]
            edited = [*first[:70], *first[100:]]
            engine.turn(conversation, first, max_new_tokens=0)
            engine.rerendered(conversation, edited, step_tokens=STEP_TOKENS)
            turn = engine.turn(
                conversation, NEXT, max_new_tokens=REPLY_TOKENS, history=edited, eos_token_ids=()
            )
            assert turn.token_ids == _fresh(reference(), edited, NEXT)


def test_a_store_that_is_gone_costs_the_pass_and_no_turn(
    tmp_path_factory: pytest.TempPathFactory, session_id: str
) -> None:
    """Killed before each of a pass's calls in turn: the conversation is the old or the new one."""
    directory = tmp_path_factory.mktemp("killed") / "data"
    with ServerProcess(directory) as server:
        number, is_reached = 0, True
        while is_reached:
            number += 1
            conversation = f"{session_id}-{number}"
            # Over the network, so that adoptions are calls, too.
            remote = ctxcache.connect(server.target, access="remote", transport="grpc")
            with remote as client, engine_on(client) as engine:
                _forget(client)
                _begun(engine, conversation)
                with _before_call(number, server.kill9) as reached:
                    done = engine.rerendered(conversation, EDITED, step_tokens=STEP_TOKENS)
                is_reached = bool(reached)
                if is_reached:
                    server.start()
            with ctxcache.connect(server.target) as client, engine_on(client) as engine:
                held = _tokens(client, conversation)
                assert held == (EDITED if done.is_in_place else FIRST), (number, done)
                _next(engine, conversation, EDITED)
                assert _next(engine, conversation, EDITED).reused_token_count == len(EDITED)
        # It took the place at last, and the steps before it were all tried.
        assert done.is_in_place
        assert number > 6


@contextmanager
def _before_call(number: int, action: Callable[[], object]) -> Iterator[list[int]]:
    """Do something before a client's call of that number, counted from 1; whether it was reached."""
    calls, reached, call = [0], list[int](), Wire.call

    def counting(wire: Wire, method: Any, request: Any) -> Any:
        calls[0] += 1
        if calls[0] == number:
            reached.append(number)
            action()
        return call(wire, method, request)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Wire, "call", counting)
        yield reached


KILLED_AT = {3: "nothing was forked", 4: "all was computed", 5: "all was saved", 6: "it took the place"}
"""Calls of a pass, and what had been done before each."""


def test_an_engine_that_is_killed_leaves_the_one_or_the_other(
    server: ServerProcess, client: Client, session_id: str, tmp_path: Path
) -> None:
    """What it had begun expires, and no turn is wrong."""
    log = tmp_path / "log"
    environment = without_settings(os.environ) | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with engine_on(client) as engine:
        for number in (*KILLED_AT, 99):
            conversation = f"{session_id}-{number}"
            _forget(client)
            _begun(engine, conversation)
            words = [server.target, conversation, str(number)]
            with log.open("a") as said:
                child = nursery().start(CHILD, words, environment, stderr=said.fileno())
                status = child.wait(120)
            assert status == (-signal.SIGKILL if number in KILLED_AT else 0), log.read_text()
            assert _tokens(client, conversation) == (EDITED if number >= 6 else FIRST)
            left = [session.name for session in _unfinished(client)]
            assert len(left) == (number in KILLED_AT and number > 3)
            # Of the rows that were computed nothing is lost: a turn finds them by their tokens.
            turn = _next(engine, conversation, EDITED)
            assert turn.reused_token_count >= (150 if number == 3 else len(EDITED) // 64 * 64)


def test_a_turn_that_cuts_its_session_leaves_it_to_be_found(client: Client, session_id: str) -> None:
    """Without a pass: what differs within a run of 64 is cut, and both renderings are found."""
    with engine_on(client) as engine:
        _begun(engine, session_id)
        turn = _next(engine, session_id, EDITED)
        assert turn.reused_token_count == 150
        # What is computed behind the cut has keys, from the run on in which the cut is.
        assert _found(client, EDITED) == len(EDITED) // 64 * 64
        assert _found(client, FIRST) == len(FIRST) // 64 * 64
        assert _next(engine, session_id, FIRST).reused_token_count >= len(FIRST) // 64 * 64
        assert _names(client) == {session_id}
    with engine_on(client, renderings=0) as engine:
        _begun(engine, f"{session_id}-none", FIRST[1:])
        _next(engine, f"{session_id}-none", FIRST[1:101])
        assert _found(client, FIRST[1:]) == 64


def test_a_history_that_begins_otherwise_keeps_what_there_was(client: Client, session_id: str) -> None:
    """Not one token stays; the conversation's name does, and what it had is a former rendering."""
    other = [9, *EDITED]
    with engine_on(client) as engine:
        _begun(engine, session_id)
        assert _next(engine, session_id, other).reused_token_count == 0
        assert _found(client, FIRST) == _found(client, [*FIRST, *NEXT]) == len(FIRST) // 64 * 64
        assert _found(client, other) == len(other) // 64 * 64
        assert _next(engine, session_id, FIRST).reused_token_count >= len(FIRST) // 64 * 64
