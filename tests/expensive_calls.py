"""The most expensive requests that one tenant may send: what tests and the neighbour harness ask a server.

A call is a method and an encoded request of it, so that to send it costs next to nothing. Knows no server.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration

from ctxcache.format.checksums import wire_checksum
from ctxcache.v1 import arena_pb2, hints_pb2, model_pb2, session_pb2

ANSWER_BYTES = 3 << 20 | 1 << 19
"""Less than the 4 MiB that stock clients take."""
STREAMS, RANGES, QUERIES, DROPS, PAGE = 4096, 256, 1000, 4096, 1000
LAYERS = STREAMS // 2
KV, HIDDEN, TOKENS = model_pb2.STATE_KIND_KV, model_pb2.STATE_KIND_HIDDEN, model_pb2.STATE_KIND_TOKENS
SESSION, MODEL, HINT, ARENA = (
    f"/ctxcache.v1.{name}Service/" for name in ("Session", "Model", "Hint", "Arena")
)
Call = tuple[str, bytes]
"""A method, and an encoded request of it."""


def everything() -> list[model_pb2.StreamRange]:
    """All streams of the large model."""
    return [model_pb2.StreamRange(kind=kind, layer_begin=0, layer_end=LAYERS) for kind in (KV, HIDDEN)]


def layout(count: int, first: int = 0) -> list[model_pb2.StreamRange]:
    """Ranges as short as can be: every other layer."""
    return [
        model_pb2.StreamRange(kind=KV, layer_begin=layer, layer_end=layer + 1)
        for layer in range(first, first + 2 * count, 2)
    ]


def large_model(name: str, salt: int = 0) -> model_pb2.Model:
    """A model of as many streams as there may be, no two of which are one range."""
    specs = [
        model_pb2.StreamSpec(
            streams=model_pb2.StreamRange(kind=kind, layer_begin=layer, layer_end=layer + 1),
            row_bytes=1 + (layer + salt) % 2,
            dtype=model_pb2.DTYPE_INT8,
        )
        for kind in (KV, HIDDEN)
        for layer in range(LAYERS)
    ]
    return model_pb2.Model(
        name=f"models/{name}",
        architecture="Large",
        dtype=model_pb2.DTYPE_INT8,
        layer_count=LAYERS,
        hidden_size=1,
        kv_head_count=1,
        head_size=1,
        is_relocatable=True,
        streams=specs,
        rope="x" * 4096,
        settings="y" * 4096,
    )


def small_model() -> model_pb2.Model:
    """A model of one stream, besides token ids."""
    spec = model_pb2.StreamSpec(
        streams=model_pb2.StreamRange(kind=KV, layer_begin=0, layer_end=1),
        row_bytes=8,
        dtype=model_pb2.DTYPE_INT8,
    )
    return model_pb2.Model(
        name="models/small",
        architecture="Small",
        dtype=model_pb2.DTYPE_INT8,
        layer_count=1,
        hidden_size=1,
        kv_head_count=1,
        head_size=1,
        is_relocatable=True,
        streams=[spec],
    )


@dataclass(frozen=True, slots=True)
class Facts:
    """The attacker's sessions: fingerprints of its models, and its long session's generation."""

    large: bytes
    small: bytes


def _registrations(_: Facts) -> list[Call]:
    requests = [model_pb2.RegisterModelRequest(model=large_model(f"new{i}", i)) for i in range(8)]
    return [(f"{MODEL}RegisterModel", each.SerializeToString()) for each in requests]


def _models(_: Facts) -> list[Call]:
    return [
        (f"{MODEL}GetModel", model_pb2.GetModelRequest(name="models/large").SerializeToString()),
        (f"{MODEL}ListModels", model_pb2.ListModelsRequest(page_size=PAGE).SerializeToString()),
    ]


def _creations(_: Facts) -> list[Call]:
    made = []
    for number in range(64):
        name = f"made{number}"
        create = session_pb2.CreateSessionRequest(
            session_id=name, model="models/large", layout=layout(RANGES, number), ttl=Duration(seconds=60)
        )
        made.append((f"{SESSION}CreateSession", create.SerializeToString()))
        delete = session_pb2.DeleteSessionRequest(name=f"sessions/{name}")
        made.append((f"{SESSION}DeleteSession", delete.SerializeToString()))
    return made


def _lists(_: Facts) -> list[Call]:
    return [(f"{SESSION}ListSessions", session_pb2.ListSessionsRequest(page_size=PAGE).SerializeToString())]


def _lookups(facts: Facts) -> list[Call]:
    query = session_pb2.LookupQuery
    asked = [query(name=f"sessions/s{i}", model_fingerprint=facts.large) for i in range(QUERIES)]
    request = session_pb2.LookupSessionsRequest(queries=asked)
    return [(f"{SESSION}LookupSessions", request.SerializeToString())]


def _too_large(facts: Facts) -> list[Call]:
    one = session_pb2.LookupSessionsRequest(
        queries=[session_pb2.LookupQuery(name="sessions/s1", model_fingerprint=facts.large)]
    ).SerializeToString()
    return [(f"{SESSION}LookupSessions", one * ((4 << 20) // len(one) - 1))]


def _drops(_: Facts) -> list[Call]:
    request = session_pb2.TruncateSessionRequest(
        name="sessions/long",
        drop=session_pb2.DropRanges(
            # Nothing, 4096 times: the session stays as long as it is.
            ranges=[session_pb2.TokenRange(begin=16 * i, end=16 * i) for i in range(DROPS)]
        ),
    )
    return [(f"{SESSION}TruncateSession", request.SerializeToString())]


def _forks(_: Facts) -> list[Call]:
    made = []
    for number in range(16):
        fork = session_pb2.ForkSessionRequest(name="sessions/long", session_id=f"fork{number}-{os.getpid()}")
        made.append((f"{SESSION}ForkSession", fork.SerializeToString()))
        delete = session_pb2.DeleteSessionRequest(name=f"sessions/{fork.session_id}")
        made.append((f"{SESSION}DeleteSession", delete.SerializeToString()))
    return made


def _hints(_: Facts) -> list[Call]:
    actions = [
        hints_pb2.HintAction(session=f"sessions/s{i}", retain=hints_pb2.RetainHint(), ttl=Duration(seconds=9))
        for i in range(256)
    ]
    return [(f"{HINT}Hint", hints_pb2.HintRequest(actions=actions).SerializeToString())]


def _reads(facts: Facts) -> list[Call]:
    request = session_pb2.ReadSessionRequest(
        name="sessions/all", model_fingerprint=facts.large, streams=everything()
    )
    return [(f"{SESSION}ReadSession", request.SerializeToString())]


def _batches(facts: Facts) -> list[Call]:
    lease = arena_pb2.AcquireLease(session="sessions/all", model_fingerprint=facts.large)
    operations = [arena_pb2.Operation(acquire_lease=lease)] * 512
    request = arena_pb2.AccessRequest(request_id=1, operations=operations)
    return [(f"{ARENA}Access", request.SerializeToString())]


def _schedules(_: Facts) -> list[Call]:
    hello = hints_pb2.ScheduleRequest(
        sequence=1, hello=hints_pb2.ScheduleHello(engine=f"engine{os.getpid()}")
    )
    jobs = [hints_pb2.Job(job_id=f"j{i}", session=f"sessions/s{i}", position=i) for i in range(1024)]
    snapshots = [
        hints_pb2.ScheduleRequest(sequence=2 + i, snapshot=hints_pb2.QueueSnapshot(jobs=jobs))
        for i in range(8)
    ]
    framed = [each.SerializeToString() for each in (hello, *snapshots)]
    return [(f"{HINT}Schedule", json.dumps([each.hex() for each in framed]).encode())]


ATTACKS: dict[str, Callable[[Facts], list[Call]]] = {
    "register": _registrations,
    "models": _models,
    "create": _creations,
    "list": _lists,
    "lookup": _lookups,
    "too_large": _too_large,
    "drop": _drops,
    "fork": _forks,
    "hint": _hints,
    "read": _reads,
    "batch": _batches,
    "schedule": _schedules,
}


def messages_of(request: bytes) -> list[bytes]:
    """The messages of a stream: one, or several as a JSON list of hexadecimal digits."""
    return [bytes.fromhex(each) for each in json.loads(request)] if request[:1] == b"[" else [request]


def append_messages(
    name: str, fingerprint: bytes, token_count: int
) -> list[session_pb2.AppendSessionRequest]:
    """An append of token ids, all of them zero, to an empty session that stores nothing else."""
    message, data = session_pb2.AppendSessionRequest, bytes(4 * token_count)
    stream = model_pb2.StreamName(layer=-1, kind=TOKENS)
    chunk = session_pb2.Chunk(stream=stream, data=data, checksum=wire_checksum(data))
    commit = session_pb2.AppendCommit(token_count=token_count, durability=session_pb2.DURABILITY_DISK)
    return [
        message(header=session_pb2.AppendHeader(name=f"sessions/{name}", model_fingerprint=fingerprint)),
        message(chunk=chunk),
        message(commit=commit),
    ]
