"""The engine against a real store: the same replies as an engine that never dropped its state."""

import os
import re
import signal
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import pytest
from server_process import ServerProcess
from sessions import made_once
from stored_model import stored_model
from transformers import DynamicCache

import ctxcache
from ctxcache.client import Client
from ctxcache.client.routes import Access
from ctxcache.errors import InvalidArgument, ModelFingerprintMismatch, SessionNotFound
from ctxcache.format.model import ModelSpec
from ctxcache.format.streams import StateKind, Stream
from gpu_worker.engines import names
from gpu_worker.engines.transformers import TransformersEngine
from gpu_worker.engines.transformers_batch import TransformersBatchEngine, TurnRequest
from gpu_worker.engines.transformers_turns import Turn
from gpu_worker.families.generation import continue_greedy, prefill
from gpu_worker.model.spec import model_spec
from gpu_worker.planning.plan import Method, RestorePlan

REPLY_TOKENS = 12
TURNS = [list(range(5, 75)), [3, 4, 5] * 9, [9, 8, 7, 60] * 5]


_model, _adapter = made_once()


@cache
def _spec(name: str) -> ModelSpec:
    return model_spec(_model(name), model_id=name)


def _reply(name: str, kept: DynamicCache, new_ids: Sequence[int]) -> list[int]:
    model = _model(name)
    reply = continue_greedy(model, kept, new_ids, max_new_tokens=REPLY_TOKENS).token_ids
    prefill(model, kept, reply[-1:])
    return reply


@cache
def _never_dropped(name: str) -> list[list[int]]:
    kept = DynamicCache(config=_model(name).config)
    return [_reply(name, kept, turn) for turn in TURNS]


def _fresh(name: str, history: Sequence[int], new_ids: Sequence[int]) -> list[int]:
    """Reply of an engine that prefills everything."""
    return _reply(name, DynamicCache(config=_model(name).config), [*history, *new_ids])


def _history(name: str, turn_count: int) -> list[int]:
    said = _never_dropped(name)
    return [token for turn, reply in zip(TURNS[:turn_count], said, strict=False) for token in (*turn, *reply)]


def _turn(
    client: Client,
    session_id: str,
    new_ids: Sequence[int],
    *,
    name: str = "llama",
    method: Method = Method.KV,
    history: Sequence[int] | None = None,
    window: int | None = None,
    on_token: Callable[[int], None] = lambda _token: None,
) -> Turn:
    """One turn by an engine that lives for it alone."""
    plan = RestorePlan.uniform(method, _spec(name).layer_count)
    with TransformersEngine(_adapter(name), client, _spec(name), plan, window=window) as engine:
        turn = engine.turn(
            session_id, new_ids, max_new_tokens=REPLY_TOKENS, history=history, on_token=on_token
        )
        engine.wait(session_id)
    return turn


def _saved_ids(client: Client, session_id: str) -> list[int]:
    with client.sessions.open(
        f"sessions/{session_id}", stored_model(client, f"sessions/{session_id}")
    ).read() as rows:
        return rows.token_ids()


def _corrupt(server: ServerProcess, client: Client, session_id: str, token: int) -> None:
    """Flip a bit of one token's KV wherever it lies on disk: other tests' sessions say the same."""
    name = f"sessions/{session_id}"
    with client.sessions.open(name, stored_model(client, name)).read() as rows:
        row = rows.array(Stream(1, StateKind.KV))[token].tobytes()
    client.admin.demote_session(name)
    path = next(Path(server.data_directory).rglob("segments.dat"))
    with path.open("r+b") as file:
        for match in re.finditer(re.escape(row), file.read()):
            file.seek(match.start())
            file.write(bytes([row[0] ^ 1]))


@pytest.mark.parametrize("access", ["local", "remote"])
@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("llama", "tokens"),
        ("llama", "kv"),
        ("llama", "hidden"),
        ("gemma3", "kv"),
        ("deepseek", "latent"),
        ("opt", "kv"),
        ("opt", "hidden"),
    ],
)
def test_dropped_after_every_turn_says_the_same(
    server: ServerProcess, session_id: str, name: str, method: str, access: Access
) -> None:
    """Each turn on an engine of its own that knows nothing gives the reply of the engine that kept all."""
    with ctxcache.connect(server.target, access=access) as client:
        turns = [_turn(client, session_id, ids, name=name, method=Method(method)) for ids in TURNS]
        saved = _saved_ids(client, session_id)

    assert [turn.token_ids for turn in turns] == _never_dropped(name)
    assert [turn.reused_token_count for turn in turns] == [0, 82, 121]
    assert [turn.prefilled_token_count for turn in turns] == [len(ids) for ids in TURNS]
    assert [turn.miss_reason for turn in turns] == ["", "", ""]
    assert saved == _history(name, 3)


def test_no_reply_asked_for_is_a_prefill(client: Client, session_id: str) -> None:
    """A turn of no generated tokens saves its own tokens once, and the next one continues them."""
    plan = RestorePlan.uniform(Method.KV, 3)
    with TransformersEngine(_model("llama"), client, _spec("llama"), plan) as engine:
        engine.turn(session_id, TURNS[0][:50], max_new_tokens=0)

    turn = _turn(client, session_id, TURNS[0][50:])

    assert turn.reused_token_count == 50
    assert turn.token_ids == _never_dropped("llama")[0]


def test_tokens_come_while_the_store_stands_still(
    server: ServerProcess, client: Client, session_id: str
) -> None:
    """Nothing that the caller waits for waits for the store.

    A turn ends on a stopped one, and is saved all the same.
    """
    plan = RestorePlan.uniform(Method.KV, 3)
    with TransformersEngine(_model("llama"), client, _spec("llama"), plan) as engine:
        try:
            turn = engine.turn(
                session_id,
                TURNS[0],
                max_new_tokens=REPLY_TOKENS,
                on_token=lambda _: os.kill(server.pid, signal.SIGSTOP),
            )
        finally:
            os.kill(server.pid, signal.SIGCONT)
        failure = engine.wait(session_id)

    assert failure is None
    assert turn.token_ids == _never_dropped("llama")[0]
    assert _saved_ids(client, session_id) == _history("llama", 1)


def test_a_damaged_segment_is_a_miss_with_a_reason(
    server: ServerProcess, client: Client, session_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Bytes that changed on disk are never used: what lies before them is, the rest is prefilled again."""
    for ids in TURNS[:2]:
        _turn(client, session_id, ids)
    _corrupt(server, client, session_id, token=100)

    turn = _turn(client, session_id, TURNS[2], history=_history("llama", 2))

    assert turn.miss_reason == "CORRUPT_SEGMENT"
    assert f"'sessions/{session_id}' is not restored whole, corrupt_segment: " in caplog.text
    assert turn.reused_token_count < 100
    assert turn.reused_token_count + turn.prefilled_token_count == 121 + len(TURNS[2])
    assert turn.token_ids == _never_dropped("llama")[2]
    assert _saved_ids(client, session_id) == _history("llama", 3)


def test_a_deleted_session_is_prefilled_again(
    client: Client, session_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With the history at hand, a session that is gone costs time and nothing else."""
    for ids in TURNS[:2]:
        _turn(client, session_id, ids)
    client.sessions.open(f"sessions/{session_id}").delete()

    turn = _turn(client, session_id, TURNS[2], history=_history("llama", 2))

    assert (turn.reused_token_count, turn.miss_reason) == (0, "SESSION_NOT_FOUND")
    assert f"'sessions/{session_id}' is not restored whole, session_not_found: " in caplog.text
    assert turn.token_ids == _never_dropped("llama")[2]
    assert _saved_ids(client, session_id) == _history("llama", 3)


def test_a_lost_save_is_named_and_made_up_for(client: Client, session_id: str) -> None:
    """A save that fails stops those behind it; the next turn says why, and prefills what is missing."""
    plan = RestorePlan.uniform(Method.KV, 3)
    with TransformersEngine(_model("llama"), client, _spec("llama"), plan) as engine:
        engine.turn(
            session_id,
            TURNS[0],
            max_new_tokens=REPLY_TOKENS,
            on_token=_once(lambda: _expire(client, f"sessions/{session_id}")),
        )
        turn = engine.turn(session_id, TURNS[1], max_new_tokens=REPLY_TOKENS, history=_history("llama", 1))

    assert turn.miss_reason == SessionNotFound.reason
    assert turn.reused_token_count == 0
    assert turn.token_ids == _never_dropped("llama")[1]
    assert _saved_ids(client, session_id) == _history("llama", 2)


def _expire(client: Client, name: str) -> None:
    """End a session's time at once, also while a save of it is open."""
    client.sessions.open(name).update(expire_time=datetime.fromtimestamp(1, UTC))


def _once(action: Callable[[], None]) -> Callable[[int], None]:
    pending = [action]

    def call(_token: int) -> None:
        if pending:
            pending.pop()()

    return call


def test_a_history_that_differs_keeps_what_is_common(client: Client, session_id: str) -> None:
    """An edited message costs the tokens from there on; the session follows the new history."""
    _turn(client, session_id, TURNS[0])
    edited = [*_history("llama", 1)[:30], 90, 91, 92]

    turn = _turn(client, session_id, TURNS[1], history=edited)

    assert (turn.reused_token_count, turn.prefilled_token_count) == (30, 3 + len(TURNS[1]))
    assert turn.token_ids == _fresh("llama", edited, TURNS[1])
    assert _saved_ids(client, session_id) == [*edited, *TURNS[1], *turn.token_ids]


@pytest.mark.parametrize("method", [Method.KV, Method.HIDDEN, Method.TOKENS])
def test_a_full_window_keeps_the_sinks(client: Client, session_id: str, method: Method) -> None:
    """The oldest half behind four sinks goes from the store, and no kept token is prefilled again."""
    _turn(client, session_id, TURNS[0], method=method)

    turn = _turn(client, session_id, TURNS[1], method=method, window=110)

    history = _history("llama", 1)
    kept = [*history[:4], *history[41:]]
    assert (turn.dropped_token_count, turn.reused_token_count) == (37, 45)
    assert (turn.prefilled_token_count, turn.miss_reason) == (len(TURNS[1]), "")
    assert _saved_ids(client, session_id) == [*kept, *TURNS[1], *turn.token_ids]


def test_recomputing_a_truncated_session_is_a_fresh_prefill(client: Client, session_id: str) -> None:
    """Where only token ids are kept, truncation is exact: nothing remembers what was dropped."""
    _turn(client, session_id, TURNS[0], method=Method.TOKENS)

    turn = _turn(client, session_id, TURNS[1], method=Method.TOKENS, window=110)

    history = _history("llama", 1)
    assert turn.token_ids == _fresh("llama", [*history[:4], *history[41:]], TURNS[1])


@pytest.mark.parametrize("known_by", ["caller", "store"])
def test_learned_positions_are_prefilled_after_truncation(
    client: Client, session_id: str, known_by: str
) -> None:
    """State that cannot move is a miss with its reason; the truncated history is prefilled instead."""
    _turn(client, session_id, TURNS[0], name="opt")
    history = _history("opt", 1)

    turn = _turn(
        client,
        session_id,
        TURNS[1],
        name="opt",
        window=110,
        history=history if known_by == "caller" else None,
    )

    kept = [*history[:4], *history[41:]]
    assert (turn.miss_reason, turn.reused_token_count) == ("POSITIONS_NOT_RELOCATABLE", 0)
    assert turn.prefilled_token_count == len(kept) + len(TURNS[1])
    assert turn.token_ids == _fresh("opt", kept, TURNS[1])


@pytest.mark.parametrize("method", [Method.KV, Method.HIDDEN], ids=["same layout", "other layout"])
def test_another_models_session_is_a_miss(
    client: Client, session_id: str, method: Method, caplog: pytest.LogCaptureFixture
) -> None:
    """It stays as it is, and the turn is computed: state of one model is never restored into another."""
    _turn(client, session_id, TURNS[0])
    before = client.sessions.get(f"sessions/{session_id}")
    known = list(range(5, 40))

    new = _turn(client, session_id, TURNS[1], name="qwen2", method=method)
    told = _turn(client, session_id, TURNS[1], name="qwen2", method=method, history=known)

    assert [new.token_ids, told.token_ids] == [_fresh("qwen2", h, TURNS[1]) for h in ([], known)]
    for turn in (new, told):
        assert (turn.miss_reason, turn.reused_token_count) == ("MODEL_FINGERPRINT_MISMATCH", 0)
    after = client.sessions.get(before.name)
    assert (after.uid, after.generation, after.token_count) == (
        before.uid,
        before.generation,
        before.token_count,
    )
    assert f"{before.name} is of models/llama, not of models/qwen2 (fingerprint " in caplog.text
    assert _turn(client, session_id, TURNS[1]).reused_token_count == before.token_count


def test_another_model_of_the_same_id_is_refused(client: Client) -> None:
    """An id names one set of weights and settings for good."""
    plan = RestorePlan.uniform(Method.KV, 3)
    client.models.register(model_spec(_model("llama"), model_id="taken"))

    with pytest.raises(ModelFingerprintMismatch):
        TransformersEngine(_model("qwen2"), client, model_spec(_model("qwen2"), model_id="taken"), plan)


ODD_NAMES = ["alice@example.com", "a b/c", "Привет", "x" * 5000, "a\ud800", ".hidden", "sha256:0", "a.rank1"]


@pytest.mark.parametrize("odd", ODD_NAMES)
def test_a_session_of_any_name_comes_back(client: Client, session_id: str, odd: str) -> None:
    """By its digest, of which no other name makes a session."""
    name = f"{odd}{session_id}" if not odd.endswith("rank1") else f"{session_id}{odd}"
    first = _turn(client, name, TURNS[0])
    second = _turn(client, name, TURNS[1])
    assert [first.token_ids, second.token_ids] == _never_dropped("llama")[:2]
    assert second.reused_token_count == len(TURNS[0]) + len(first.token_ids)
    assert client.sessions.get(f"sessions/{names.session_id(name)}").token_count > second.reused_token_count


@pytest.mark.parametrize("damage", ["cut to nothing", "cut", "deleted", "damaged"])
def test_a_damaged_session_is_saved_again_each_time(
    server: ServerProcess, client: Client, session_id: str, damage: str
) -> None:
    """Three times over, whoever damaged it: the turn behind the next one finds all of it."""
    for round_ in range(3):
        history = _history("llama", 1)
        turn = _turn(client, session_id, TURNS[1], history=history)
        assert turn.token_ids == _never_dropped("llama")[1]
        whole = _turn(client, session_id, TURNS[2], history=_history("llama", 2))
        assert whole.token_ids == _never_dropped("llama")[2]
        assert whole.reused_token_count == len(_history("llama", 2)), (round_, whole.miss_reason)
        name = f"sessions/{session_id}"
        if damage == "deleted":
            client.sessions.open(name).delete()
        elif damage == "damaged":
            _corrupt(server, client, session_id, 3)
        else:
            client.sessions.open(name).keep_first(0 if damage == "cut to nothing" else 33)


def test_a_session_has_the_labels_of_its_engine_and_its_turn(client: Client, session_id: str) -> None:
    """Given where the turn makes it, and again where the store has lost it meanwhile; a batch's, too."""
    spec = _spec("llama")
    plan = RestorePlan.uniform(Method.KV, spec.layer_count)
    labels = {"user": "4711", "app": "mail"}
    name = f"sessions/{session_id}"
    with TransformersEngine(_model("llama"), client, spec, plan, labels={"app": "chat", "v": "1"}) as engine:
        engine.turn(session_id, TURNS[0], max_new_tokens=1, labels=labels)
        engine.turn(session_id, TURNS[1], max_new_tokens=1, labels={"user": "0"})
        engine.wait(session_id)
        assert client.sessions.get(name).labels == {"v": "1", **labels}
        with pytest.raises(InvalidArgument, match="labels"):
            engine.turn(f"{session_id}-bad", TURNS[0], max_new_tokens=1, labels={"user": "a b"})
    with TransformersBatchEngine(_model("llama"), client, spec, plan) as batch:
        batch.turns([TurnRequest(f"{session_id}-batch", TURNS[0], 1, labels=labels)])
        batch.wait(f"{session_id}-batch")
    assert client.sessions.get(f"{name}-batch").labels == labels
