"""Idle sessions come to lie in smaller forms, whole at every moment, and are as near as their kind."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from tiny_models import build
from transformers import DynamicCache, PreTrainedModel

from ctxcache.client import Client, SessionHandle
from ctxcache.client.types import SessionInfo
from ctxcache.errors import (
    CacheError,
    GenerationMismatch,
    InvalidArgument,
    SessionInUse,
    SessionNotFound,
    WriteInProgress,
)
from ctxcache.format.model import ModelSpec
from ctxcache.format.packing import LOSSY_KINDS
from ctxcache.format.streams import TOKENS, StateKind, Stream
from gpu_worker.engines.transformers import TransformersEngine
from gpu_worker.engines.transformers_turns import Turn
from gpu_worker.families import Adapter
from gpu_worker.families.generation import continue_greedy, prefill
from gpu_worker.model.proof import adapt
from gpu_worker.model.spec import model_spec
from gpu_worker.planning.datasheets import known_profile
from gpu_worker.planning.layout import Kinds
from gpu_worker.planning.plan import Method, RestorePlan
from gpu_worker.saving.aging import STAGED, Aging, kinds_text

PROMPTS = [list(range(5, 75)), [3, 4, 5] * 9, [9, 8, 7, 60] * 5]
REPLY_TOKENS = 4
LAYERS = 3
DAY_S = 86_400.0
PROFILE = replace(known_profile("cpu"), gemm_flops_per_s=1e6, attention_flops_per_s=1e6)
"""A machine on which computing takes longer than reading, also for a tiny model."""
HUGE = 1e12
"""A rent by which nothing is worth keeping for long."""


@cache
def _model() -> PreTrainedModel:
    torch.set_num_threads(1)
    return build("llama")


@cache
def _adapter() -> Adapter:
    return adapt(_model())


@cache
def _spec(*, is_lossy: bool = True) -> ModelSpec:
    packed = LOSSY_KINDS if is_lossy else ()
    return model_spec(_model(), model_id=f"aging-{is_lossy}", packed_kinds=packed)


@cache
def _never_dropped() -> list[list[int]]:
    kept = DynamicCache(config=_model().config)
    replies = []
    for prompt in PROMPTS:
        replies.append(
            continue_greedy(_model(), kept, prompt, max_new_tokens=REPLY_TOKENS, eos_token_ids=()).token_ids
        )
        prefill(_model(), kept, replies[-1][-1:])
    return replies


def _engine(client: Client, **settings: Any) -> TransformersEngine:
    # Any: the engine's own keyword arguments.
    return TransformersEngine(_adapter(), client, _spec(**settings), profile=PROFILE, snapshot_every=None)


def _turn(engine: TransformersEngine, session_id: str, index: int) -> Turn:
    turn = engine.turn(session_id, PROMPTS[index], max_new_tokens=REPLY_TOKENS, eos_token_ids=())
    engine.wait(session_id)
    return turn


def _all(kind: StateKind | None) -> Kinds:
    return (kind,) * LAYERS


def _aging(
    client: Client,
    rent: float = HUGE,
    *,
    is_lossy: bool = True,
    thaw_s: float = 0.0,
    returning: float | None = 1.0,
) -> Aging:
    model = client.models.register(_spec(is_lossy=is_lossy))
    hot = [Stream(layer, StateKind.KV) for layer in range(LAYERS)]
    return Aging(
        _adapter(), client, model, PROFILE, hot, rent_s_per_gb_hour=rent, thaw_s=thaw_s, returning=returning
    )


def _saved(client: Client, session_id: str, *, is_lossy: bool = True) -> SessionInfo:
    """A session of one turn, saved as K/V."""
    plan = RestorePlan.uniform(Method.KV, LAYERS)
    with TransformersEngine(_adapter(), client, _spec(is_lossy=is_lossy), plan) as engine:
        assert _turn(engine, session_id, 0).token_ids == _never_dropped()[0]
    return client.sessions.get(f"sessions/{session_id}")


def _kinds(client: Client, session: SessionInfo) -> set[StateKind]:
    return {stream.kind for stream in client.sessions.get(session.name).streams()} - {StateKind.TOKENS}


def test_forms_get_smaller_the_longer_a_session_is_idle(client: Client, session_id: str) -> None:
    """Each for a time, the dearer the rent the sooner; lossy ones only where the model lists them."""
    session, aging = _saved(client, session_id), _aging(client, 1e4)
    times_s = [0.0, *(10.0**power for power in range(12))]
    found = [aging.due(session, idle_s) for idle_s in times_s]
    sizes = [form.size_bytes if form else float("inf") for form in found]

    assert sizes == sorted(sizes, reverse=True)
    assert found[0] is None
    assert found[-1] is not None
    assert (found[-1].kinds, found[-1].size_bytes) == (_all(None), 4 * session.token_count)
    first = next(idle_s for idle_s, form in zip(times_s, found, strict=True) if form)
    dearer = _aging(client, 1e7)
    assert dearer.due(session, first / 100) is not None
    assert any(kind in LOSSY_KINDS for form in found if form for kind in form.kinds)
    # A session that hardly ever comes back is soon not worth its rent.
    seldom = _aging(client, 1e4, returning=0.01)
    sooner = [seldom.due(session, idle_s) for idle_s in times_s]
    assert [form is not None for form in sooner] >= [form is not None for form in found]
    assert sum(form is None or any(form.kinds) for form in sooner) < sum(
        form is None or any(form.kinds) for form in found
    )
    # For each time the form is the cheapest of all that were found.
    for idle_s, form in zip(times_s, found, strict=True):
        if form is not None:
            costs = [other.cost_s(idle_s, 1e4) for other in found if other]
            assert form.cost_s(idle_s, 1e4) == min(costs)
    exact = _saved(client, session_id + "exact", is_lossy=False)
    for idle_s in times_s:
        due = _aging(client, 1e4, is_lossy=False).due(exact, idle_s)
        assert due is None or not set(due.kinds) & set(LOSSY_KINDS)


@pytest.mark.parametrize(
    "kind",
    [
        None,
        StateKind.HIDDEN,
        StateKind.KV_INT8,
        StateKind.KV_INT4,
        StateKind.HIDDEN_DELTA_INT4,
        StateKind.HIDDEN_DELTA_INT3,
    ],
)
def test_replies_go_on_from_every_form(client: Client, session_id: str, kind: StateKind | None) -> None:
    """Exact forms say what was never dropped; others come back as near as their kind is."""
    session, aging = _saved(client, session_id), _aging(client)
    kinds = _all(kind)
    if kind is StateKind.HIDDEN_DELTA_INT4:
        kinds = (StateKind.HIDDEN_INT8, *kinds[1:])
    if kind is StateKind.HIDDEN_DELTA_INT3:
        # On what token ids give, out of exact inputs that the session has by then.
        session = aging.reencode(session, _all(StateKind.HIDDEN))
        kinds = (None, *kinds[1:])
    made = aging.reencode(session, kinds)

    assert kinds_text(tuple(k for k in kinds)) == ("tokens" if kind is None else kinds_text(kinds))
    assert (made.uid != session.uid, made.token_count) == (True, session.token_count)
    assert made.access_time_ns == session.access_time_ns
    assert _kinds(client, session) == {each for each in kinds if each}
    assert not [one for one in client.sessions.list() if one.name.startswith(f"sessions/{STAGED}")]
    with _engine(client) as engine:
        cost = engine.cost(session_id)
        replies = [_turn(engine, session_id, index).token_ids for index in (1, 2)]
    assert cost.token_count == session.token_count
    assert (cost.size_bytes > 0) or kind is None
    if kind not in LOSSY_KINDS:
        assert replies == _never_dropped()[1:]
    else:
        assert all(len(reply) == REPLY_TOKENS for reply in replies)
        assert _distance(client, session_id) < 0.5


def _distance(client: Client, session_id: str) -> float:
    """By how much logits behind the restored session differ from those of its tokens, in deviations."""
    with _engine(client) as engine:
        session = client.sessions.get(f"sessions/{session_id}")
        own = client.models.register(_spec())
        with client.sessions.open(session, own).read(streams=[TOKENS]) as rows:
            ids = rows.token_ids()
        start = engine._restore(session, None, 1, Turn())
        assert start.restoring is not None
        start.restoring.restoration.wait_all()
        found = prefill(_model(), start.cache, [11])
        start.restoring.end()
    expected = prefill(_model(), DynamicCache(config=_model().config), [*ids, 11])
    return float((found - expected).abs().max() / expected.std())


def test_another_session_s_rows_are_seen(
    client: Client, session_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the distance: a form whose rows are those of other tokens is far away."""
    session, aging = _saved(client, session_id), _aging(client)
    held_rows = aging._held_rows

    def shifted(*args: Any) -> Any:
        for ids, rows in held_rows(*args):
            yield ids, {stream: part.roll(1, 0) for stream, part in rows.items()}

    monkeypatch.setattr(aging, "_held_rows", shifted)
    aging.reencode(session, _all(StateKind.KV_INT8))
    assert _distance(client, session_id) > 0.5


def test_a_sweep_ages_what_is_idle_and_warms_what_is_used(client: Client, session_id: str) -> None:
    """Cold after days; left so while nobody comes; K/V again, computed from its tokens, when it is used."""
    session = _saved(client, session_id, is_lossy=False)
    aging = _aging(client, is_lossy=False, thaw_s=300.0)
    later_s = (session.access_time_ns or 0) / 1e9 + 30 * DAY_S

    def swept(now_s: float) -> list[tuple[str, str, str]]:
        found = [one for one in aging.sweep(now_s=now_s) if one.session_name == session.name]
        return [(one.before, one.after, one.reason) for one in found]

    assert swept(later_s) == [("kv:0-2", "tokens", "")]
    assert swept(later_s + DAY_S) == []
    with _engine(client, is_lossy=False) as engine:
        assert _turn(engine, session_id, 1).token_ids == _never_dropped()[1]
    assert swept(time.time()) == [("tokens", "kv:0-2", "")]
    with _engine(client, is_lossy=False) as engine:
        turn = _turn(engine, session_id, 2)
    assert (turn.token_ids, turn.miss_reason) == (_never_dropped()[2], "")


def test_sweeps_learn_how_many_sessions_return(client: Client, session_id: str) -> None:
    """As `simulate` counts turns; what was there before counts once it returned, or is gone."""
    for session in client.sessions.list():
        client.sessions.open(session.name).delete()
    aging = _aging(client, 1e-9, returning=None)

    def learned() -> float:
        assert list(aging.sweep()) == []
        return aging.returning

    for number in range(3):
        _saved(client, f"{session_id}-{number}")
    found = [learned(), learned()]
    client.sessions.open(f"sessions/{session_id}-0").update()
    found.append(learned())
    _saved(client, f"{session_id}-3")
    found.append(learned())
    client.sessions.open(f"sessions/{session_id}-1").delete()
    client.sessions.open(f"sessions/{session_id}-3").delete()
    found.append(learned())

    # Turns and first turns: none; 2 and 1; 3 and 2; 4 and 3.
    assert found == pytest.approx([1.0, 1.0, 2 / 3, 2 / 4, 2 / 5])
    fixed = _aging(client, returning=0.25)
    assert fixed.returning == 0.25


def test_what_is_used_is_left_alone(client: Client, session_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read, written, changed or gone meanwhile: each its reason, and nothing is left of the attempt."""
    session, aging = _saved(client, session_id), _aging(client)
    own = client.models.register(_spec())
    handle = client.sessions.open(session, own)

    def refused(error: type[CacheError]) -> None:
        with pytest.raises(error):
            aging.reencode(session, _all(None))
        assert not [one for one in client.sessions.list() if one.name.startswith(f"sessions/{STAGED}")]

    with handle.read(streams=[TOKENS]) as rows:
        assert rows.is_local
        refused(SessionInUse)
    with handle.writer(5):
        refused(WriteInProgress)
    assert _kinds(client, session) == {StateKind.KV}
    fill = aging._fill

    def changed(staged: SessionHandle, *rest: Any) -> None:
        fill(staged, *rest)
        client.sessions.open(session.name).keep_first(session.token_count - 1)

    with monkeypatch.context() as patch:
        patch.setattr(aging, "_fill", changed)
        refused(GenerationMismatch)
    refused(GenerationMismatch)
    assert client.sessions.get(session.name).token_count == session.token_count - 1
    client.sessions.open(session.name).delete()
    refused(SessionNotFound)


def test_a_session_that_lost_tokens_keeps_its_rows(client: Client, session_id: str) -> None:
    """They saw tokens that are gone, and token ids alone would bring back others."""
    session, aging = _saved(client, session_id), _aging(client)
    cut = client.sessions.open(session.name).keep_recent(40)
    with pytest.raises(InvalidArgument, match="has lost tokens"):
        aging.reencode(cut, _all(None))
    later_s = (session.access_time_ns or 0) / 1e9 + 30 * DAY_S
    found = {one.session_name: one.reason for one in aging.sweep(now_s=later_s)}
    assert found[session.name] == InvalidArgument.reason
    assert _kinds(client, session) == {StateKind.KV}


class _KilledError(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("place", range(6))
def test_a_kill_leaves_the_one_form_or_the_other(
    client: Client, session_id: str, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each call of the store, before and behind it; what was begun expires by itself."""
    session, aging = _saved(client, session_id), _aging(client)
    is_over = False

    def dying(name: str, at: int, of: Any) -> None:
        call = getattr(of, name)

        def run(*args: Any, **facts: Any) -> Any:
            nonlocal is_over
            if is_over or place == at:
                is_over = True
                raise _KilledError
            found = call(*args, **facts)
            if place == at + 1:
                is_over = True
                raise _KilledError
            return found

        monkeypatch.setattr(of, name, run)

    for at, (of, name) in enumerate(
        ((client.sessions, "create"), (SessionHandle, "append"), (SessionHandle, "fork"))
    ):
        dying(name, 2 * at, of)
    dying("delete", 99, SessionHandle)
    with pytest.raises(_KilledError):
        aging.reencode(session, _all(StateKind.KV_INT4))
    monkeypatch.undo()

    assert _kinds(client, session) == {StateKind.KV_INT4 if place == 5 else StateKind.KV}
    left = [one for one in client.sessions.list() if one.name.startswith(f"sessions/{STAGED}")]
    assert len(left) == (place > 0)
    assert all(one.ttl_ns == 600 * 10**9 for one in left)
    for one in left:
        client.sessions.open(one.name).delete()
    with _engine(client) as engine:
        turn = _turn(engine, session_id, 1)
    assert turn.reused_token_count == session.token_count
    if place < 5:
        assert turn.token_ids == _never_dropped()[1]


def test_settings_and_kinds_that_cannot_be_are_refused(client: Client, session_id: str) -> None:
    """With the field; and an engine whose plan is the caller's knows no costs."""
    session, aging = _saved(client, session_id), _aging(client)
    wrong: Sequence[tuple[str, Callable[[], object]]] = (
        ("rent", lambda: _aging(client, 0.0)),
        ("rent", lambda: _aging(client, float("nan"))),
        ("thaw", lambda: _aging(client, thaw_s=-1.0)),
        ("returning", lambda: _aging(client, returning=0.0)),
        ("returning", lambda: _aging(client, returning=1.1)),
        ("kinds", lambda: aging.reencode(session, _all(None)[1:])),
        ("layout", lambda: aging.reencode(session, _all(StateKind.LATENT))),
        ("streams", lambda: aging.reencode(session, _all(StateKind.HIDDEN_DELTA_INT4))),
    )
    for field, call in wrong:
        with pytest.raises(InvalidArgument) as raised:
            call()
        assert raised.value.field == field
    assert _kinds(client, session) == {StateKind.KV}
    plan = RestorePlan.uniform(Method.KV, LAYERS)
    with TransformersEngine(_adapter(), client, _spec(), plan) as engine, pytest.raises(InvalidArgument):
        engine.aging()
    with _engine(client) as engine:
        ages = [engine.aging(rent_s_per_gb_hour=rent).due(session, DAY_S) for rent in (1e-9, HUGE)]
    assert ages[0] is None
    assert ages[1] is not None


def test_kinds_are_told_by_runs() -> None:
    """As plans are written."""
    told = [kinds_text(kinds) for kinds in (_all(None), _all(StateKind.KV), (None, StateKind.KV, None))]
    assert told == ["tokens", "kv:0-2", "tokens:0,kv:1,tokens:2"]
    assert all(a != b for a, b in pairwise(told))
