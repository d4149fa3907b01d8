"""Calls that move rows name the caller's own model: another model's session is refused on every way."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
from far_side import HIDDEN, KV, LAYOUT, OWN, SPEC, make_rows
from live_server import LiveServer, serving, settings_in

import ctxcache
from ctxcache.client import CallerModel, Client, DecodeBatch, SessionWriter
from ctxcache.client.types import SessionInfo
from ctxcache.errors import InvalidArgument, ModelFingerprintMismatch
from ctxcache.format.streams import DType, StreamSpec
from lab.routes import Route, route_options

MIB = 1 << 20
ACCESSES: tuple[Route, ...] = ("local-socket", "local-grpc", "bulk", "grpc")
SPEC_NAME = re.escape(OWN.name)
OTHER_WEIGHTS = CallerModel(replace(SPEC, weights_digest="others"))
OTHER_DTYPE = CallerModel(
    replace(
        SPEC,
        dtype=DType.BFLOAT16,
        streams=tuple(StreamSpec(spec.stream, spec.row_bytes, DType.BFLOAT16) for spec in SPEC.streams),
    )
)
OTHER_ORDER = CallerModel(replace(SPEC, streams=(StreamSpec(HIDDEN, 16, DType.FLOAT16), SPEC.streams[1])))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with a session of a model."""
    place = tmp_path_factory.mktemp("models")
    sizes = {"arena_size_bytes": 16 * MIB, "ssd_size_bytes": 16 * MIB}
    with serving(settings_in(place, bulk_listen="127.0.0.1:0", **sizes)) as started:
        with ctxcache.connect(started.target) as client:
            client.models.register(SPEC)
            client.sessions.create(OWN, id="kept", layout=LAYOUT)
            client.sessions.open("sessions/kept", OWN).append(make_rows(70))
        yield started


CALLS: dict[str, Callable[[Client, str | SessionInfo, CallerModel], object]] = {
    "read": lambda client, session, model: client.sessions.open(session, model).read(),
    "read the end": lambda client, session, model: client.sessions.open(session, model).read(begin=60),
    "append": lambda client, session, model: client.sessions.open(session, model).append(
        make_rows(1, first=70)
    ),
    "writer": lambda client, session, model: client.sessions.open(session, model).writer(1),
    "decode": lambda client, session, model: client.sessions.decode_batch([session], model),
}


def calls_by(access: Route) -> list[str]:
    """Decode batches write in place, by local ways alone."""
    return [call for call in CALLS if call != "decode" or access.startswith("local")]


@pytest.mark.parametrize("other", [OTHER_WEIGHTS, OTHER_DTYPE, OTHER_ORDER], ids=["weights", "dtype", "rows"])
@pytest.mark.parametrize("is_known", [False, True], ids=["by name", "by snapshot"])
@pytest.mark.parametrize(("access", "call"), [(way, call) for way in ACCESSES for call in calls_by(way)])
def test_another_models_session_is_refused(
    server: LiveServer, access: Route, call: str, other: CallerModel, *, is_known: bool
) -> None:
    """Same shapes, other weights or element types: no row is read and none is written."""
    with ctxcache.connect(server.target, **route_options(access)) as client, ExitStack() as held:
        before = client.sessions.get("sessions/kept")
        if call == "read":
            held.enter_context(client.sessions.open("sessions/kept", OWN).read())

        with pytest.raises(ModelFingerprintMismatch) as caught:
            CALLS[call](client, before if is_known else "sessions/kept", other)

        assert caught.value.facts["expected"] == other.fingerprint.hex()
        # The client knows the name of the caller's model, the server its fingerprint alone.
        wanted = f"({SPEC_NAME} as this caller describes it|the caller's model)"
        prints = f"fingerprint {OWN.fingerprint.hex()[:12]}, not {other.fingerprint.hex()[:12]}"
        sentence = rf"sessions/kept is of {SPEC_NAME}, not of {wanted} \({prints}\)"
        assert re.fullmatch(sentence, str(caught.value))
        after = client.sessions.get("sessions/kept")
    assert (after.generation, after.token_count) == (before.generation, before.token_count)


def use(opened: object) -> None:
    """Write what was opened for writing, so that a refusal that comes late comes too."""
    if isinstance(opened, DecodeBatch) and opened.failures:
        raise opened.failures[0]
    if isinstance(opened, SessionWriter):
        for stream, rows in make_rows(1, first=70).items():
            opened.write(stream, 0, rows)
        opened.commit()


@pytest.mark.parametrize(("access", "call"), [(way, call) for way in ACCESSES for call in calls_by(way)])
def test_the_server_refuses_what_a_forged_snapshot_lets_pass(
    server: LiveServer, access: Route, call: str
) -> None:
    """The client believes a snapshot; the server compares the caller's fingerprint with the session's own."""
    with ctxcache.connect(server.target, **route_options(access)) as client:
        forged = replace(client.sessions.get("sessions/kept"), model_fingerprint=OTHER_WEIGHTS.fingerprint)

        with pytest.raises(ModelFingerprintMismatch):
            use(CALLS[call](client, forged, OTHER_WEIGHTS))


def test_rows_of_another_element_type_are_refused(server: LiveServer) -> None:
    """The bytes would fit: float16 and bfloat16 rows are equally long."""
    with ctxcache.connect(server.target) as client:
        rows = {stream: rows.copy() for stream, rows in make_rows(1, first=70).items()}
        for wrong in (np.zeros((1, 8), np.int16), np.zeros((1, 4), np.float32)):
            with pytest.raises(InvalidArgument, match="float16"):
                client.sessions.open("sessions/kept", OWN).append({**rows, KV: wrong})

        assert client.sessions.get("sessions/kept").token_count == 70
