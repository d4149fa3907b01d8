"""Restores of sessions that lie only on SSD.

The same by every path, and a miss or the store's rows when files fail.
"""

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from on_ssd import direct_by, flip, flip_in_arena, leave, restored, save
from server_process import ServerProcess
from sessions import Session, contents, saved_session
from slow_pipelines import SMALL, slowed
from stored_model import stored_model

import ctxcache
from ctxcache.client import Client
from ctxcache.client.rows import FiledRows
from ctxcache.errors import CorruptSegment, LeaseNotFound, TierFailure, Unavailable
from ctxcache.format.layout import SEGMENT_TOKENS
from ctxcache.format.streams import StateKind, Stream
from gpu_worker.direct import DirectPath
from gpu_worker.direct.source import LandingSource
from gpu_worker.direct.storage import DirectStorage
from gpu_worker.pipeline.pipeline import PipelineSettings
from gpu_worker.pipeline.sources import BatchLanding, Cuts

WAYS = ("posix", "gds")
CHUNKS = PipelineSettings(slot_bytes=1 << 16, slot_count=2, batch_tokens=SEGMENT_TOKENS, is_poisoned=True)
"""Buffers of whole chunks."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A store with two SSD paths."""
    root = tmp_path_factory.mktemp("store")
    with ServerProcess(root / "data", "--ssd-directories", f"{root}/ssd0,{root}/ssd1") as running:
        yield running


def saved(kind: StateKind = StateKind.KV, name: str = "llama") -> tuple[Session, str]:
    """A session of the model, and the plan that restores it from that kind."""
    session = saved_session(name)
    return session, f"{kind.name.lower()}:0-2"


def files_of(client: Client) -> tuple[Path, ...]:
    """The store's files."""
    files = client.ssd_files()
    assert files is not None
    return tuple(map(Path, files.paths))


def is_same(found: object, expected: object) -> bool:
    """Whether two caches hold the same, bit for bit."""
    return all(
        torch.equal(mine, theirs)
        for layer in range(3)
        for mine, theirs in zip(contents(found, layer), contents(expected, layer), strict=True)  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama", StateKind.KV),
        ("llama", StateKind.HIDDEN),
        ("deepseek", StateKind.LATENT),
        ("llama", StateKind.HIDDEN_INT8),
        ("llama", StateKind.KV_INT4),
    ],
)
@pytest.mark.parametrize("is_unified", [True, False])
def test_every_path_restores_the_same(
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
    session_id: str,
    name: str,
    kind: StateKind,
    *,
    is_unified: bool,
) -> None:
    """By the store, from files into the host's memory, and into a device's.

    Short segments, two SSD paths, small buffers.
    """
    session, plan = saved(kind, name)
    kept = save(client, session, session_id, [kind])
    ways = ["posix", "gds", "store"] if not is_unified else ["posix", "store"]
    caches = {}
    for way in ways:
        direct, opened = direct_by(client, way, monkeypatch)
        with slowed("compute", is_unified=is_unified, settings=SMALL if is_unified else CHUNKS) as pipeline:
            caches[way] = restored(direct, pipeline, session, kept, plan)
        assert not direct.failures
        assert (direct.read_bytes > 0) == (way != "store")
        assert (client.sessions.get(kept.name).dram_bytes > 0) == (way == "store")
        if way == "gds":
            assert direct.live.path is DirectPath.GDS
            assert sum(files.read_count for files in opened) > 0

    assert all(is_same(cache, caches["store"]) for cache in caches.values())


@pytest.mark.parametrize("way", ["store", "posix", "gds"])
def test_a_byte_that_changed_in_memory_is_not_restored(
    client: Client, monkeypatch: pytest.MonkeyPatch, session_id: str, way: str
) -> None:
    """SSD's rows take their place, by every path that finds rows in shared memory."""
    session, plan = saved()
    kept = save(client, session, session_id, [StateKind.KV])
    with slowed(settings=CHUNKS) as pipeline:
        expected = restored(direct_by(client, "store", monkeypatch)[0], pipeline, session, kept, plan)
        before = client.admin.stats().mended_segment_count
        flip_in_arena(client, kept, Stream(1, StateKind.KV))
        found = restored(direct_by(client, way, monkeypatch)[0], pipeline, session, kept, plan)

    assert is_same(found, expected)
    assert client.admin.stats().mended_segment_count == before + 1


@pytest.mark.parametrize("fault", ["raises", "short"])
@pytest.mark.parametrize("at", [0, 3])
def test_a_device_that_cannot_read_leaves_it_to_the_store(
    client: Client, monkeypatch: pytest.MonkeyPatch, session_id: str, fault: str, at: int
) -> None:
    """Counted, and right all the same; the next restore tries again."""
    session, plan = saved()
    kept = save(client, session, session_id, [StateKind.KV])
    direct, opened = direct_by(client, "gds", monkeypatch)
    with slowed(settings=CHUNKS) as pipeline:
        expected = restored(direct, pipeline, session, kept, plan)
        opened[0].read_count, opened[0].fault, opened[0].fault_at = 0, fault, at
        found = restored(direct, pipeline, session, kept, plan)
        assert direct.failures == {"TIER_FAILURE": 1}
        leave(client, kept.name)
        again = restored(direct, pipeline, session, kept, plan)

    assert direct.failures == {"TIER_FAILURE": 1}
    assert is_same(found, expected)
    assert is_same(again, expected)


def test_a_file_that_cannot_be_read_leaves_it_to_the_store(
    client: Client, monkeypatch: pytest.MonkeyPatch, session_id: str
) -> None:
    """An I/O error of the host's own reads."""
    session, plan = saved()
    kept = save(client, session, session_id, [StateKind.KV])
    direct, _ = direct_by(client, "posix", monkeypatch)

    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with slowed(settings=CHUNKS) as pipeline:
        expected = restored(direct, pipeline, session, kept, plan)
        monkeypatch.setattr(os, "preadv", broken)
        found = restored(direct, pipeline, session, kept, plan)

    assert direct.failures == {"TIER_FAILURE": 1}
    assert is_same(found, expected)


def test_reads_of_many_batches_are_under_way_at_a_time(
    client: Client, monkeypatch: pytest.MonkeyPatch, session_id: str
) -> None:
    """As many as there are buffers: no read ends here before 32 have begun."""
    session, plan = saved()
    kept = save(client, session, session_id, [StateKind.KV])
    direct, opened = direct_by(client, "gds", monkeypatch)
    many = replace(SMALL, slot_count=40, batch_tokens=4)
    with slowed(settings=many) as pipeline:
        expected = restored(direct, pipeline, session, kept, plan)
        opened[0].read_count, opened[0].wanted = 0, 32
        opened[0].may_end.clear()
        found = restored(direct, pipeline, session, kept, plan)

    assert opened[0].read_count > 32
    assert not direct.failures
    assert is_same(found, expected)


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_read_that_fails_within_a_chunk_is_a_miss(
    client: Client, monkeypatch: pytest.MonkeyPatch, session_id: str, at: int
) -> None:
    """Its other rows are on the device, and could not be verified any more. The store reads next."""
    session, plan = saved()
    kept = save(client, session, session_id, [StateKind.KV])
    direct, opened = direct_by(client, "gds", monkeypatch)
    with slowed(settings=replace(SMALL, slot_count=8)) as pipeline:
        expected = restored(direct, pipeline, session, kept, plan)
        opened[0].read_count, opened[0].fault, opened[0].fault_at = 0, "raises", at
        # Said by the lane that waits for the read, or by the one that begins the next.
        with pytest.raises(TierFailure):
            restored(direct, pipeline, session, kept, plan)
        again = restored(direct, pipeline, session, kept, plan)

    assert direct.failures == {"TIER_FAILURE": 1}
    assert is_same(again, expected)
    assert client.sessions.get(kept.name).dram_bytes > 0


@pytest.mark.parametrize("at", [0, 2])
def test_bytes_that_are_wrong_on_the_device_are_a_miss(
    client: Client, monkeypatch: pytest.MonkeyPatch, session_id: str, at: int
) -> None:
    """No layer of them is announced, however late they are verified.

    The store reads next, and finds no damage.
    """
    session, plan = saved()
    kept = save(client, session, session_id, [StateKind.KV])
    direct, opened = direct_by(client, "gds", monkeypatch)
    with slowed("copy", settings=CHUNKS) as pipeline:
        expected = restored(direct, pipeline, session, kept, plan)
        opened[0].read_count, opened[0].fault, opened[0].fault_at = 0, "flipped", at
        with pytest.raises(CorruptSegment):
            restored(direct, pipeline, session, kept, plan)
        again = restored(direct, pipeline, session, kept, plan)
        assert client.sessions.get(kept.name).dram_bytes > 0

    assert direct.failures == {"CORRUPT_SEGMENT": 1}
    assert is_same(again, expected)


def test_the_check_would_see_bytes_that_were_not_verified(
    client: Client, monkeypatch: pytest.MonkeyPatch, session_id: str
) -> None:
    """The planted bug: without verifying, the flipped byte is in the cache."""
    session, plan = saved()
    kept = save(client, session, session_id, [StateKind.KV])
    direct, opened = direct_by(client, "gds", monkeypatch)
    monkeypatch.setattr(BatchLanding, "sum_up", lambda _landing: None)
    with slowed(settings=CHUNKS) as pipeline:
        expected = restored(direct, pipeline, session, kept, plan)
        opened[0].read_count, opened[0].fault = 0, "flipped"

        assert not is_same(restored(direct, pipeline, session, kept, plan), expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", ["header", "row"])
def test_damage_on_the_device_ends_the_session_there(
    client: Client, monkeypatch: pytest.MonkeyPatch, session_id: str, way: str, place: str
) -> None:
    """A miss with the reason, by whoever finds it.

    And the store, which is made to look, ends the session before it.
    """
    session, plan = saved()
    kept = save(client, session, session_id, [StateKind.KV])
    direct, _ = direct_by(client, way, monkeypatch)
    stream = Stream(1, StateKind.KV)
    with direct.read(kept, stored_model(client, kept.name), streams=[stream]) as rows:
        assert isinstance(rows, FiledRows)
        (run,) = rows.runs(SEGMENT_TOKENS + 1, SEGMENT_TOKENS + 2)
        assert run.slot is not None
        chunk = run.slot.chunk(stream)
    offset = run.offset_bytes + 300 if place == "header" else chunk.offset_bytes + 5
    flip(files_of(client)[chunk.path_index], offset)

    with slowed(settings=CHUNKS) as pipeline:
        reasons = []
        for _ in range(2):
            if client.sessions.get(kept.name).token_count < session.token_count:
                break
            with pytest.raises(CorruptSegment) as caught:
                restored(direct, pipeline, session, kept, plan)
            reasons.append(caught.value.reason)

    assert 1 <= len(reasons) <= 2
    assert client.sessions.get(kept.name).token_count == SEGMENT_TOKENS
    assert direct.failures == {"CORRUPT_SEGMENT": 1}


@pytest.mark.parametrize("way", WAYS)
def test_a_lease_that_ends_meanwhile_is_a_miss(
    client: Client, monkeypatch: pytest.MonkeyPatch, session_id: str, way: str
) -> None:
    """Past its deadline, which nobody but this side knows yet."""
    session, plan = saved()
    kept = save(client, session, session_id, [StateKind.KV])
    direct, _ = direct_by(client, way, monkeypatch)
    held: list[FiledRows] = []
    read = DirectStorage.read

    def kept_rows(self: DirectStorage, *given: object, **named: object) -> object:
        rows = read(self, *given, **named)  # type: ignore[arg-type]
        assert isinstance(rows, FiledRows)
        held.append(rows)
        return rows

    def end() -> None:
        held[0].hold.deadline_ns = 0

    monkeypatch.setattr(DirectStorage, "read", kept_rows)
    with slowed("compute", "copy", "read", settings=CHUNKS) as pipeline, pytest.raises(LeaseNotFound):
        restored(direct, pipeline, session, kept, plan, meanwhile=end)


def test_a_store_that_is_killed_meanwhile_is_a_miss(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its files are there and can be read; whose they will be, nobody knows.

    Started again, it is all there.
    """
    session, plan = saved()
    is_killed, land = threading.Event(), LandingSource.land

    def land_later(
        source: LandingSource, stream: Stream, begin: int, end: int, into: torch.Tensor, cuts: Cuts
    ) -> BatchLanding:
        # Layers behind the first come when the store is gone, however fast this machine is.
        if stream.layer:
            assert is_killed.wait(20)
        return land(source, stream, begin, end, into, cuts)

    def kill(store: ServerProcess) -> None:
        store.kill9()
        is_killed.set()

    monkeypatch.setattr(LandingSource, "land", land_later)
    with ServerProcess(tmp_path / "data") as server:
        with ctxcache.connect(server.unix_target, timeout_s=5) as client:
            kept = save(client, session, "killed", [StateKind.KV])
            direct, _ = direct_by(client, "gds", monkeypatch)
            with (
                slowed("compute", "copy", "read", settings=CHUNKS) as pipeline,
                pytest.raises((LeaseNotFound, Unavailable)),
            ):
                restored(direct, pipeline, session, kept, plan, meanwhile=lambda: kill(server))
        assert is_killed.is_set()
        server.start()
        with ctxcache.connect(server.unix_target, timeout_s=5) as client, slowed(settings=CHUNKS) as pipeline:
            direct, _ = direct_by(client, "posix", monkeypatch)
            restored(direct, pipeline, session, kept, plan)
            assert direct.read_bytes > 0


def test_files_that_cannot_be_opened_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, session_id: str
) -> None:
    """The path is off, with the reason, and the store reads."""
    session, plan = saved()
    # A server of its own: clients of one process share what they have opened.
    with ServerProcess(tmp_path / "data") as server:
        with ctxcache.connect(server.unix_target) as client:
            kept = save(client, session, session_id, [StateKind.KV])
            path = files_of(client)[0]
        hidden = path.rename(path.with_name("hidden"))
        try:
            with ctxcache.connect(server.unix_target) as fresh, slowed(settings=CHUNKS) as pipeline:
                direct, _ = direct_by(fresh, "posix", monkeypatch)
                restored(direct, pipeline, session, kept, plan)
                assert direct.live.path is DirectPath.OFF
                assert direct.live.reason == f"{path}: No such file or directory"
                assert direct.read_bytes == 0
        finally:
            hidden.rename(path)


def test_a_driver_that_cannot_open_the_files_is_given_up(
    client: Client, monkeypatch: pytest.MonkeyPatch, session_id: str
) -> None:
    """By POSIX from then on, and said so."""
    session, plan = saved()
    kept = save(client, session, session_id, [StateKind.KV])
    direct, _ = direct_by(client, "gds", monkeypatch)
    monkeypatch.undo()
    with slowed(settings=CHUNKS) as pipeline:
        restored(direct, pipeline, session, kept, plan)

    assert direct.live.path is DirectPath.POSIX
    assert "kvikio" in direct.live.reason
    assert direct.failures == {"TIER_FAILURE": 1}
    assert direct.read_bytes > 0
