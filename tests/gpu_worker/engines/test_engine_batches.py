"""Several sessions restored and computed together, on a real store: each reply as if it were alone."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from server_process import ServerProcess
from sessions import made_once
from transformers import DynamicCache

import ctxcache
from ctxcache.client import Client
from ctxcache.client.arena import Bytes
from ctxcache.client.routes import Access
from ctxcache.errors import CacheError, CapacityExceeded, CorruptSegment, InvalidArgument, LeaseNotFound
from ctxcache.format.model import ModelSpec
from ctxcache.format.streams import Stream
from gpu_worker.engines.transformers import TransformersEngine
from gpu_worker.engines.transformers_batch import TransformersBatchEngine, TurnRequest
from gpu_worker.errors import UnsupportedArchitecture
from gpu_worker.families.generation import continue_greedy, prefill
from gpu_worker.model.spec import model_spec
from gpu_worker.pipeline.sources import LeasedSource
from gpu_worker.planning.datasheets import known_profile
from gpu_worker.planning.plan import Method, RestorePlan
from gpu_worker.planning.profile import Link

REPLY_TOKENS = 9
PROMPTS = {
    "short": [[5, 6, 7], [8, 9]],
    "long": [list(range(3, 93)), [4, 5] * 20],
    "middle": [[60] * 33, [7] * 5],
}
"""Two turns each, of other lengths, so that prompts and replies share passes."""


_model, _adapter = made_once()


@cache
def _spec(name: str) -> ModelSpec:
    return model_spec(_model(name), model_id=name)


def _alone(name: str, turns: Sequence[Sequence[int]]) -> list[list[int]]:
    """Replies of a model that keeps its cache."""
    model, kept, replies = _model(name), DynamicCache(config=_model(name).config), []
    for turn in turns:
        reply = continue_greedy(model, kept, turn, max_new_tokens=REPLY_TOKENS, eos_token_ids=()).token_ids
        prefill(model, kept, reply[-1:])
        replies.append(reply)
    return replies


def _requests(turn: int, prefix: str) -> list[TurnRequest]:
    return [
        TurnRequest(f"{prefix}-{name}", prompts[turn], REPLY_TOKENS, eos_token_ids=())
        for name, prompts in PROMPTS.items()
    ]


def _engine(client: Client, name: str, method: Method = Method.KV) -> TransformersBatchEngine:
    plan = RestorePlan.uniform(method, _spec(name).layer_count)
    return TransformersBatchEngine(_adapter(name), client, _spec(name), plan)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One store for all."""
    with ServerProcess(tmp_path_factory.mktemp("store") / "data") as server:
        yield server


@pytest.mark.parametrize(
    ("name", "method"),
    [("llama", "hidden"), ("gemma3", "kv"), ("opt", "kv")],
)
def test_replies_are_those_of_one_at_a_time(store: ServerProcess, name: str, method: str) -> None:
    """Over a second engine that knows nothing, and on in an engine of one at a time."""
    said = {session: _alone(name, prompts) for session, prompts in PROMPTS.items()}
    # Names that are no ids of the store.
    prefix = f"{name} {method}@example.com"
    with ctxcache.connect(store.target) as client:
        for turn in range(2):
            with _engine(client, name, Method(method)) as engine:
                results = engine.turns(_requests(turn, prefix))
            assert [one.token_ids for one in results] == [replies[turn] for replies in said.values()]
            assert [one.miss_reason for one in results] == [""] * 3
            held = [0 if not turn else len(prompts[0]) + REPLY_TOKENS for prompts in PROMPTS.values()]
            assert [one.reused_token_count for one in results] == held
            assert [one.prefilled_token_count for one in results] == [len(p[turn]) for p in PROMPTS.values()]
        plan = RestorePlan.uniform(Method(method), _spec(name).layer_count)
        with TransformersEngine(_model(name), client, _spec(name), plan) as engine:
            session, prompts = next(iter(PROMPTS.items()))
            last = engine.turn(f"{prefix}-{session}", [11, 12], max_new_tokens=REPLY_TOKENS, eos_token_ids=())
        assert last.token_ids == _alone(name, [*prompts, [11, 12]])[2]
        assert last.reused_token_count == sum(map(len, prompts)) + 2 * REPLY_TOKENS


def test_a_session_that_is_lost_or_edited_is_computed_beside_the_others(store: ServerProcess) -> None:
    """The caller's tokens replace those that the store lacks."""
    with ctxcache.connect(store.target) as client, _engine(client, "llama") as engine:
        first = engine.turns(_requests(0, "edited"))
        known = [[*PROMPTS[name][0], *one.token_ids] for name, one in zip(PROMPTS, first, strict=True)]
        for name in PROMPTS:
            engine.wait(f"edited-{name}")
        client.sessions.open("sessions/edited-long").delete()
        known[2][20:] = [1] * len(known[2][20:])
        requests = [
            TurnRequest(f"edited-{name}", PROMPTS[name][1], REPLY_TOKENS, history=history, eos_token_ids=())
            for name, history in zip(PROMPTS, known, strict=True)
        ]
        second = engine.turns(requests)
        assert [one.reused_token_count for one in second] == [len(known[0]), 0, 20]
        for one, history, request in zip(second, known, requests, strict=True):
            assert one.token_ids == _alone("llama", [[*history, *request.new_token_ids]])[0]


def test_another_models_session_is_computed_beside_the_others(store: ServerProcess) -> None:
    """It stays as it is, whatever its layout, and the others are restored."""
    with ctxcache.connect(store.target) as client:
        with _engine(client, "qwen2", Method.HIDDEN) as foreign:
            foreign.turns(_requests(0, "foreign")[:1])
        with _engine(client, "llama") as engine:
            engine.turns(_requests(0, "foreign")[1:])
        before = client.sessions.get("sessions/foreign-short")
        with _engine(client, "llama") as engine:
            results = engine.turns(_requests(1, "foreign"))
        after = client.sessions.get(before.name)

    assert [one.miss_reason for one in results] == ["MODEL_FINGERPRINT_MISMATCH", "", ""]
    assert [one.reused_token_count > 0 for one in results] == [False, True, True]
    short, *others = PROMPTS.values()
    assert results[0].token_ids == _alone("llama", [short[1]])[0]
    assert [one.token_ids for one in results[1:]] == [_alone("llama", prompts)[1] for prompts in others]
    assert (after.uid, after.generation, after.token_count) == (
        before.uid,
        before.generation,
        before.token_count,
    )


def test_replies_end_where_they_would_alone(store: ServerProcess) -> None:
    """At an end token, after as many as were asked for, or before the first."""
    prompt = PROMPTS["long"][0]
    (reply,) = _alone("llama", [prompt])
    end = reply[3]
    with ctxcache.connect(store.target) as client, _engine(client, "llama") as engine:
        results = engine.turns(
            [
                TurnRequest("ends-token", prompt, REPLY_TOKENS, eos_token_ids=[end]),
                TurnRequest("ends-count", prompt, 5, eos_token_ids=()),
                TurnRequest("ends-none", prompt, 0),
            ]
        )
        until_end = reply[: reply.index(end) + 1]
        assert [one.token_ids for one in results] == [until_end, reply[:5], []]
        for name, count in (("token", len(until_end)), ("count", 5), ("none", 0)):
            engine.wait(f"ends-{name}")
            assert client.sessions.get(f"sessions/ends-{name}").token_count == len(prompt) + count


def _prompts(store: ServerProcess, prefix: str) -> list[TurnRequest]:
    """Both turns' requests; the first ones are behind the sessions."""
    with ctxcache.connect(store.target) as client, _engine(client, "llama", Method.HIDDEN) as engine:
        engine.turns(_requests(0, prefix))
    return _requests(1, prefix)


def _second_replies() -> list[list[int]]:
    return [_alone("llama", prompts)[1] for prompts in PROMPTS.values()]


@pytest.mark.parametrize(("access", "bus_bytes_per_s"), [("local", 1e3), ("local", 1e9), ("remote", 1e6)])
def test_restores_that_recompute_take_turns_with_passes(
    store: ServerProcess, access: Access, bus_bytes_per_s: float
) -> None:
    """From a bus over which nothing is worth copying to one on which nothing is worth computing again."""
    prefix = f"planned-{access}-{bus_bytes_per_s:.0f}"
    requests = _prompts(store, prefix)
    profile = replace(known_profile("cpu"), copy=Link(bus_bytes_per_s), remote=Link(bus_bytes_per_s))
    with (
        ctxcache.connect(store.target, access=access) as client,
        TransformersBatchEngine(_model("llama"), client, _spec("llama"), profile=profile) as engine,
    ):
        results = engine.turns(requests)
        assert [one.token_ids for one in results] == _second_replies()
        assert all(one.miss_reason == "" and one.predicted_ns and one.restored_ns for one in results)
        # The next one finds what these saved, and one alone goes as ever.
        again = engine.turn(f"{prefix}-short", [11, 12], max_new_tokens=REPLY_TOKENS, eos_token_ids=())
    assert again.token_ids == _alone("llama", [*PROMPTS["short"], [11, 12]])[2]


@pytest.mark.parametrize("error", [CorruptSegment, LeaseNotFound])
def test_a_restore_that_fails_beside_others_is_computed_and_they_are_not(
    store: ServerProcess, monkeypatch: pytest.MonkeyPatch, error: type[CacheError]
) -> None:
    """The short one's, which comes first; where rows were damaged it is restored once more."""
    prefix = f"failing-{error.__name__}"
    requests, fill = _prompts(store, prefix), LeasedSource.fill
    raised: list[type[CacheError]] = []

    def failing(source: LeasedSource, stream: Stream, begin: int, end: int, into: Bytes) -> None:
        if not raised and stream.layer == 1:
            raised.append(error)
            raise (
                CorruptSegment(segment_id="1", problem="planted")
                if error is CorruptSegment
                else LeaseNotFound(lease_id=1)
            )
        fill(source, stream, begin, end, into)

    monkeypatch.setattr(LeasedSource, "fill", failing)
    histories = [[*prompts[0], *_alone("llama", prompts)[0]] for prompts in PROMPTS.values()]
    requests = [replace(one, history=known) for one, known in zip(requests, histories, strict=True)]
    with ctxcache.connect(store.target) as client, _engine(client, "llama", Method.HIDDEN) as engine:
        results = engine.turns(requests)
    assert [one.token_ids for one in results] == _second_replies()
    assert [one.miss_reason for one in results] == [error.reason, "", ""]
    reused = [len(known) for known in histories]
    assert [one.reused_token_count for one in results] == [reused[0] * (error is CorruptSegment), *reused[1:]]


def test_sessions_that_have_no_room_beside_others_are_restored_behind_them(
    store: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease that is refused while others hold theirs is asked for again when they do not."""
    requests, begin = _prompts(store, "no-room"), TransformersBatchEngine._begin
    held: list[Any] = []

    def full(engine: TransformersBatchEngine, *args: Any, **others: Any) -> Any:
        if any(not restoring._is_over for restoring in held):
            raise CapacityExceeded(tier="dram", needed_bytes=1, free_bytes=0, limit_bytes=0)
        start = begin(engine, *args, **others)
        held.append(start.restoring)
        return start

    monkeypatch.setattr(TransformersBatchEngine, "_begin", full)
    with ctxcache.connect(store.target) as client, _engine(client, "llama", Method.HIDDEN) as engine:
        results = engine.turns(requests)
    assert len(held) == 3
    assert [one.token_ids for one in results] == _second_replies()
    assert all(one.reused_token_count and not one.miss_reason for one in results)


def test_what_cannot_be_batched_is_refused(store: ServerProcess) -> None:
    """A session twice, no tokens, and a model whose cache is not what its attention looks at."""
    with ctxcache.connect(store.target) as client:
        with _engine(client, "llama") as engine:
            for requests, field in (
                ([TurnRequest("same", [5], 1), TurnRequest("same", [6], 1)], "session_id"),
                ([TurnRequest("empty", [], 1)], "token_ids"),
            ):
                with pytest.raises(InvalidArgument) as raised:
                    engine.turns(requests)
                assert raised.value.field == field
            assert engine.turns([]) == []
        own = _model("deepseek").config._attn_implementation
        with pytest.raises(UnsupportedArchitecture, match=r"holds other state|packed pass"):
            _engine(client, "deepseek", Method.LATENT)
        assert _model("deepseek").config._attn_implementation == own
