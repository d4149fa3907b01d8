"""Prefixes of the typed client, against a real server, by each way that a call may take."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from far_side import LAYOUT, OWN, SPEC
from live_server import LiveServer

import ctxcache
from ctxcache.client import CallerModel, Client
from ctxcache.client.routes import Access, Transport
from ctxcache.client.types import Durability, LookupState, PrefixMatch
from ctxcache.errors import CacheError, InvalidArgument, ModelNotFound
from ctxcache.format.layout import slot_bytes
from ctxcache.format.streams import TOKENS, Stream
from ctxcache.settings.config import Settings

PROMPT = np.arange(5, 205, dtype=np.int64)


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveServer]:
    """A small server."""
    settings = Settings(
        data_directory=tmp_path / "data", listen="", unix_socket=str(tmp_path / "socket"), bulk_listen="",
        arena_size_bytes=1 << 20, ssd_size_bytes=4 << 20, arena_huge_pages="off", drain_timeout_s=5,
    )  # fmt: skip
    made = LiveServer(settings)
    yield made
    with contextlib.suppress(CacheError):
        made.stop()
    made.close()


@pytest.fixture(params=["local socket", "local grpc", "remote grpc"])
def client(request: pytest.FixtureRequest, live: LiveServer) -> Iterator[Client]:
    """A client by each way that a call may take."""
    access: Access
    transport: Transport
    access, transport = request.param.split()
    with ctxcache.connect(live.target, timeout_s=10, access=access, transport=transport) as made:
        made.models.register(SPEC)
        yield made


def rows_of(token_ids: np.ndarray) -> dict[Stream, np.ndarray]:
    """Rows that spell their token's id."""
    specs = OWN.specs(LAYOUT)
    rows = {
        stream: np.repeat(token_ids.astype(np.uint8)[:, None], spec.row_bytes, axis=1)
        for stream, spec in specs.items()
    }
    rows[TOKENS] = token_ids.astype("<i4")
    return rows


def test_a_prompt_is_adopted_and_continued(client: Client) -> None:
    """Match, adopt, append the rest: the rows are those of both writers."""
    assert client.prefixes.match(OWN, PROMPT, layout=LAYOUT) == PrefixMatch(
        LookupState.MISS, reason="NOT_STORED"
    )
    first = client.sessions.create(OWN, id="a", layout=LAYOUT)
    assert first.adopt(PROMPT).token_count == 0
    first.append(rows_of(PROMPT), durability=Durability.DISK)
    assert client.prefixes.match(OWN, PROMPT, layout=LAYOUT) == PrefixMatch(
        LookupState.HIT, 192, 192, "SHORT"
    )

    longer = np.concatenate([PROMPT[:130], np.arange(7, 60)])
    assert client.prefixes.match(OWN, list(longer), layout=LAYOUT).token_count == 128
    second = client.sessions.create(OWN, id="b", layout=LAYOUT)
    assert second.adopt(longer).token_count == second.info.token_count == 128
    second.append(rows_of(longer[second.info.token_count :]))
    with second.read() as found:
        for stream, expected in rows_of(longer).items():
            assert found.array(stream).tobytes() == expected.tobytes()
    [shared] = client.prefixes.most_shared()
    assert (shared.token_count, shared.session_count) == (128, 2)
    assert shared.session in ("sessions/a", "sessions/b")
    assert shared.saved_bytes == 2 * slot_bytes(list(OWN.specs(LAYOUT).values()))


def test_what_cannot_be_asked_is_refused_by_name(client: Client) -> None:
    """By the client where no server needs to be asked."""
    unknown = CallerModel(replace(SPEC, model_id="none"))
    with pytest.raises(ModelNotFound):
        client.prefixes.match(unknown, PROMPT, layout=LAYOUT)
    for bad in ([1.5], [[1, 2]], [1 << 31], []):
        with pytest.raises(InvalidArgument, match="token_ids"):
            client.prefixes.match(OWN, bad, layout=LAYOUT)  # type: ignore[arg-type]  # that is what is tested
    session = client.sessions.create(OWN, id="a", layout=LAYOUT)
    session.append(rows_of(PROMPT))
    with pytest.raises(InvalidArgument, match="has or had tokens"):
        session.adopt(PROMPT)
