"""The engine with a planner.

The same replies as one that never dropped its state, begun before all is restored.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from sessions import made_once
from stored_model import stored_model
from transformers import DynamicCache

import ctxcache
from ctxcache.client import CallerModel, Client, SessionHandle, SessionRows
from ctxcache.client.arena import Bytes
from ctxcache.errors import (
    CacheError,
    CorruptSegment,
    InvalidArgument,
    SessionNotFound,
    Unavailable,
    WriteOffsetMismatch,
)
from ctxcache.format.model import ModelSpec
from ctxcache.format.streams import TOKENS, StateKind, Stream
from gpu_worker.engines.transformers import TransformersEngine
from gpu_worker.engines.transformers_turns import Turn
from gpu_worker.errors import RestoreTooLate
from gpu_worker.families.generation import continue_greedy, prefill
from gpu_worker.model.proof import adapt
from gpu_worker.model.spec import model_spec
from gpu_worker.pipeline.pipeline import PipelineSettings
from gpu_worker.pipeline.planned import Chooser
from gpu_worker.pipeline.sources import LeasedSource
from gpu_worker.planning.datasheets import known_profile
from gpu_worker.planning.plan import RestorePlan
from gpu_worker.planning.profile import Link

REPLY_TOKENS = 6
TURNS = [list(range(5, 75)), [3, 4, 5] * 9, [9, 8, 7, 60] * 5]
SMALL = PipelineSettings(slot_bytes=8192, slot_count=2, batch_tokens=16, is_poisoned=True)


_model, _adapter = made_once()
_, _others_adapter = made_once()
"""Of a copy of each model: engines of one model wait for each other's turns."""


@cache
def _spec(name: str) -> ModelSpec:
    return model_spec(_model(name), model_id=f"planned-{name}")


@cache
def _never_dropped(name: str) -> list[list[int]]:
    kept = DynamicCache(config=_model(name).config)
    replies = []
    for turn in TURNS:
        replies.append(
            continue_greedy(_model(name), kept, turn, max_new_tokens=REPLY_TOKENS, eos_token_ids=()).token_ids
        )
        prefill(_model(name), kept, replies[-1][-1:])
    return replies


def _history(name: str, turn_count: int) -> list[int]:
    said = _never_dropped(name)
    return [token for turn, reply in zip(TURNS[:turn_count], said, strict=False) for token in (*turn, *reply)]


def _engine(client: Client, name: str, hardware: str = "cpu") -> TransformersEngine:
    return TransformersEngine(
        _adapter(name), client, _spec(name), profile=known_profile(hardware), settings=SMALL
    )


def _other_engine(client: Client) -> TransformersEngine:
    return TransformersEngine(
        _others_adapter("llama"), client, _spec("llama"), profile=known_profile("cpu"), settings=SMALL
    )


def _turn(
    engine: TransformersEngine, session_id: str, index: int, *, history: Sequence[int] | None = None
) -> Turn:
    turn = engine.turn(
        session_id, TURNS[index], max_new_tokens=REPLY_TOKENS, history=history, eos_token_ids=()
    )
    engine.wait(session_id)
    return turn


@pytest.mark.parametrize("access", ["local", "remote"])
@pytest.mark.parametrize(
    ("name", "hardware"), [("llama", "cpu"), ("gemma3", "h100"), ("deepseek", "a30"), ("neox", "h100")]
)
def test_a_planned_restore_says_the_same(
    server: object, client: Client, session_id: str, name: str, hardware: str, access: str
) -> None:
    """Each turn on an engine of its own; what was planned and what it took are both told."""
    turns = []
    with ctxcache.connect(client.wire.target, access=access) as reader:  # type: ignore[arg-type]
        for index in range(3):
            with _engine(reader, name, hardware) as engine:
                turns.append(_turn(engine, session_id, index))

    assert [turn.token_ids for turn in turns] == _never_dropped(name)
    assert [turn.reused_token_count for turn in turns] == [0, 76, 109]
    assert [turn.miss_reason for turn in turns] == ["", "", ""]
    assert all(turn.predicted_ns > 0 and turn.restored_ns > 0 for turn in turns[1:])


def test_a_session_says_what_it_would_take_to_bring_back(client: Client, session_id: str) -> None:
    """Never more than by another way, more with every turn; and nothing moves by asking."""
    with _engine(client, "llama") as engine:
        with pytest.raises(SessionNotFound):
            engine.cost(session_id)
        costs = []
        for index in range(2):
            _turn(engine, session_id, index)
            before = client.sessions.get(f"sessions/{session_id}")
            costs.append(engine.cost(session_id))
            assert client.sessions.get(f"sessions/{session_id}") == before
    assert [cost.token_count for cost in costs] == [76, 109]
    assert all(0 < cost.restored_s <= min(cost.others_s.values()) * (1 + 1e-9) for cost in costs)
    assert costs[0].size_bytes < costs[1].size_bytes
    assert costs[0].others_s["recompute"] < costs[1].others_s["recompute"]
    assert all(cost.dram_token_count == cost.token_count for cost in costs)
    plan = RestorePlan.parse("kv:0-2")
    with (
        TransformersEngine(_model("llama"), client, _spec("llama"), plan) as engine,
        pytest.raises(InvalidArgument) as raised,
    ):
        engine.cost(session_id)
    assert raised.value.field == "profile"


def test_rows_on_ssd_cost_more_than_rows_in_dram() -> None:
    """By the time that reading takes, where nothing else hides it."""
    chooser = Chooser(adapt(_model("llama")), None, replace(known_profile("cpu"), ssd=Link(1e6)))
    held = [Stream(layer, StateKind.KV) for layer in range(3)]
    costs = [chooser.cost(held, 6400, in_dram) for in_dram in (6400, 3200, 0)]
    seconds = [cost.others_s["kv"] for cost in costs]
    assert seconds[0] < seconds[1] < seconds[2]
    assert [cost.restored_s for cost in costs] == sorted(cost.restored_s for cost in costs)
    nothing = chooser.cost(held, 0, 0)
    assert (nothing.size_bytes, nothing.restored_s) == (0, 0)


def _failing_at(piece: int, error: Exception) -> Callable[[LeasedSource, Stream, int, int, Bytes], None]:
    left = [piece]
    fill = LeasedSource.fill

    def failing(source: LeasedSource, stream: Stream, begin: int, end: int, into: Bytes) -> None:
        left[0] -= 1
        if left[0] == -1:
            raise error
        fill(source, stream, begin, end, into)

    return failing


@pytest.mark.parametrize("piece", [0, 4, 9, 13])
@pytest.mark.parametrize("is_known", [True, False])
def test_a_restore_that_fails_is_a_miss_and_the_reply_is_right(
    client: Client, session_id: str, monkeypatch: pytest.MonkeyPatch, piece: int, *, is_known: bool
) -> None:
    """Whether it fails before the model runs or under its first pass: everything is prefilled again."""
    with _engine(client, "llama") as engine:
        _turn(engine, session_id, 0)
        error = CorruptSegment(segment_id="1", problem="planted")
        monkeypatch.setattr(LeasedSource, "fill", _failing_at(piece, error))
        history = _history("llama", 1)
        turn = _turn(engine, session_id, 1, history=history if is_known else None)
        monkeypatch.undo()
        last = _turn(engine, session_id, 2)

    assert turn.token_ids == _never_dropped("llama")[1]
    assert turn.miss_reason == "CORRUPT_SEGMENT"
    assert turn.prefilled_token_count + turn.reused_token_count == len(history) + len(TURNS[1])
    assert last.token_ids == _never_dropped("llama")[2]


@pytest.mark.parametrize("piece", [0, 7, 14])
def test_a_lease_that_ends_under_the_restore_is_a_clean_miss(
    client: Client, session_id: str, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    """Given back while pieces are copied.

    The rows may be anybody's by now, and none of that layer's are used.
    """
    left = [piece]
    fill = LeasedSource.fill

    def releasing(source: LeasedSource, stream: Stream, begin: int, end: int, into: Bytes) -> None:
        fill(source, stream, begin, end, into)
        left[0] -= 1
        if left[0] == -1:
            source._rows.close()

    with _engine(client, "llama") as engine:
        _turn(engine, session_id, 0)
        monkeypatch.setattr(LeasedSource, "fill", releasing)
        turn = _turn(engine, session_id, 1)

    assert turn.token_ids == _never_dropped("llama")[1]
    assert (turn.reused_token_count, turn.miss_reason) == (0, "LEASE_NOT_FOUND")


@pytest.mark.parametrize("piece", [0, 9])
@pytest.mark.parametrize(
    "error", [RestoreTooLate(what="planted"), Unavailable(target="planted", problem="gone")]
)
@pytest.mark.parametrize("is_known", [True, False])
def test_what_the_store_still_has_is_not_saved_again(
    client: Client,
    session_id: str,
    monkeypatch: pytest.MonkeyPatch,
    piece: int,
    error: CacheError,
    *,
    is_known: bool,
) -> None:
    """A restore that did not come about says nothing against the session: only what is new is appended."""
    with _engine(client, "llama") as engine:
        _turn(engine, session_id, 0)
        monkeypatch.setattr(LeasedSource, "fill", _failing_at(piece, error))
        monkeypatch.setattr(SessionHandle, "keep_first", _never)
        monkeypatch.setattr(SessionHandle, "fork", _never)
        history = _history("llama", 1)
        turn = _turn(engine, session_id, 1, history=history if is_known else None)
        monkeypatch.undo()
        last = _turn(engine, session_id, 2)

    assert (turn.miss_reason, turn.reused_token_count) == (error.reason, 0)
    assert turn.prefilled_token_count == len(history) + len(TURNS[1])
    assert (last.miss_reason, last.reused_token_count) == ("", len(_history("llama", 2)))
    assert [turn.token_ids, last.token_ids] == _never_dropped("llama")[1:]


def _never(*_: object, **_options: object) -> None:
    pytest.fail("the session was cut")


def test_a_session_that_grows_before_it_is_read_is_planned_anew(
    client: Client, session_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows read count, not those that were looked up."""
    read = SessionHandle.read

    def growing(*args: Any, **options: Any) -> SessionRows:  # Any: as read takes them
        monkeypatch.undo()
        _turn(other, session_id, 1)
        return read(*args, **options)

    with _engine(client, "llama") as engine, _other_engine(client) as other:
        _turn(engine, session_id, 0)
        monkeypatch.setattr(SessionHandle, "read", growing)
        turn = _turn(engine, session_id, 2)

    assert turn.token_ids == _never_dropped("llama")[2]
    assert turn.reused_token_count == len(_history("llama", 2))
    assert client.sessions.get(f"sessions/{session_id}").token_count == len(_history("llama", 3))


@pytest.mark.parametrize("planned_by", ["profile", "kv:0-2", "hidden:0-2", "tokens:0,kv:1-2"])
def test_sessions_are_saved_and_restored_as_they_were_created(
    client: Client, session_id: str, planned_by: str
) -> None:
    """Whatever this engine would create: three layouts in turn, more than savers are kept for."""
    layouts = ["hidden:0,kv:1-2", "kv:0,hidden:1-2", "tokens:0-1,kv:2"]
    client.models.register(_spec("llama"))
    for layout in layouts:
        client.sessions.create(
            CallerModel(_spec("llama")),
            id=f"{session_id}-{layout[0]}",
            layout={TOKENS, *RestorePlan.parse(layout).streams()},
        )
    plan = None if planned_by == "profile" else RestorePlan.parse(planned_by)
    with TransformersEngine(
        _model("llama"), client, _spec("llama"), plan, profile=known_profile("cpu"), settings=SMALL
    ) as engine:
        turns = [
            [_turn(engine, f"{session_id}-{layout[0]}", index) for layout in layouts] for index in range(3)
        ]

    for index, of_layouts in enumerate(turns):
        assert [turn.token_ids for turn in of_layouts] == [_never_dropped("llama")[index]] * 3
        assert [turn.miss_reason for turn in of_layouts] == [""] * 3
        assert [turn.reused_token_count for turn in of_layouts] == [len(_history("llama", index))] * 3


@pytest.mark.parametrize("piece", [0, 9])
def test_what_another_wrote_under_a_restore_that_fails_is_not_cut(
    client: Client, session_id: str, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    """Rows that turn out damaged while another engine has gone on with the session.

    Its tokens stay, and this turn is not saved.
    """
    fill = LeasedSource.fill
    left = [piece]

    def overtaken(source: LeasedSource, stream: Stream, begin: int, end: int, into: Bytes) -> None:
        left[0] -= 1
        if left[0] == -1:
            monkeypatch.setattr(LeasedSource, "fill", fill)
            _turn(other, session_id, 1)
            raise CorruptSegment(segment_id="1", problem="planted")
        fill(source, stream, begin, end, into)

    with _engine(client, "llama") as engine, _other_engine(client) as other:
        _turn(engine, session_id, 0)
        monkeypatch.setattr(LeasedSource, "fill", overtaken)
        turn = engine.turn(session_id, TURNS[1], max_new_tokens=REPLY_TOKENS, eos_token_ids=())
        failure = engine.wait(session_id)
        name = f"sessions/{session_id}"
        with client.sessions.open(name, stored_model(client, name)).read(streams=[TOKENS]) as rows:
            held = rows.token_ids()

    assert turn.token_ids == _never_dropped("llama")[1]
    assert (turn.miss_reason, turn.reused_token_count) == ("CORRUPT_SEGMENT", 0)
    assert isinstance(failure, WriteOffsetMismatch)
    assert held == _history("llama", 2)


@pytest.mark.parametrize("piece", [0, 9])
def test_what_the_store_cut_off_is_written_anew(
    client: Client, session_id: str, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    """A store that finds rows damaged cuts the session there: that is nobody else's change."""
    fill = LeasedSource.fill
    left = [piece]

    def cutting(source: LeasedSource, stream: Stream, begin: int, end: int, into: Bytes) -> None:
        left[0] -= 1
        if left[0] == -1:
            client.sessions.open(f"sessions/{session_id}").keep_first(64)
            raise CorruptSegment(segment_id="1", problem="planted")
        fill(source, stream, begin, end, into)

    with _engine(client, "llama") as engine:
        _turn(engine, session_id, 0)
        monkeypatch.setattr(LeasedSource, "fill", cutting)
        turn = _turn(engine, session_id, 1)
        monkeypatch.undo()
        last = _turn(engine, session_id, 2)

    assert (turn.miss_reason, turn.token_ids) == ("CORRUPT_SEGMENT", _never_dropped("llama")[1])
    assert (last.miss_reason, last.reused_token_count) == ("", len(_history("llama", 2)))
    assert last.token_ids == _never_dropped("llama")[2]


def test_a_session_that_changes_before_it_is_cut_is_looked_at_again(
    client: Client, session_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An edited history cuts the session as it was seen, or sees it anew."""
    fork = SessionHandle.fork

    def overtaken(handle: SessionHandle, **options: Any) -> SessionHandle:  # Any: as it takes them
        monkeypatch.undo()
        _turn(other, session_id, 1)
        return fork(handle, **options)

    edited = [*_history("llama", 1)[:30], 90, 91, 92]
    with _engine(client, "llama") as engine, _other_engine(client) as other:
        _turn(engine, session_id, 0)
        monkeypatch.setattr(SessionHandle, "fork", overtaken)
        turn = _turn(engine, session_id, 1, history=edited)

    assert (turn.reused_token_count, turn.miss_reason) == (30, "GENERATION_MISMATCH")
    assert client.sessions.get(f"sessions/{session_id}").token_count == 33 + len(TURNS[1]) + REPLY_TOKENS


@pytest.mark.parametrize("timeout_s", [-1.0, 0.0, 1e12, float("inf")])
def test_any_time_may_be_given_to_a_restore(client: Client, session_id: str, timeout_s: float) -> None:
    """None at all is a miss, more than a clock can count is a long time."""
    with TransformersEngine(
        _model("llama"), client, _spec("llama"), profile=known_profile("cpu"), restore_timeout_s=timeout_s
    ) as engine:
        turns = [_turn(engine, session_id, index) for index in range(2)]

    assert [turn.token_ids for turn in turns] == _never_dropped("llama")[:2]
    assert turns[1].miss_reason == ("" if timeout_s > 0 else "RESTORE_TOO_LATE")


def test_an_engine_needs_a_plan_or_a_profile(client: Client) -> None:
    """Neither is an error of the caller's."""
    with pytest.raises(InvalidArgument, match="plan"):
        TransformersEngine(_model("llama"), client, _spec("llama"))


def test_what_is_saved_follows_the_profile(client: Client, session_id: str) -> None:
    """A model whose latents are smaller is never saved as hidden states."""
    with _engine(client, "deepseek", "h100") as engine:
        _turn(engine, session_id, 0)
    layout = client.sessions.get(f"sessions/{session_id}").layout

    assert StateKind.HIDDEN not in {StateKind(stream.kind) for stream in layout}
