"""The contract of a metadata store, as tests, and records to put into one.

    class TestMyStore(MetadataContract):
        @pytest.fixture
        def open_store(self): ...

Knows no implementation. Worst case: a store that passes and loses a record in a power cut; what a
kill or a refused sync does is for the implementation's own tests.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from ctxcache.format.layout import SegmentIdentity, Slot
from ctxcache.format.streams import TOKENS, DType, StateKind, Stream, StreamSpec
from ctxcache.storage.metadata.base import (
    Changes,
    KeyedSegment,
    MetadataStore,
    ModelRecord,
    SegmentRecord,
    SessionRecord,
)
from tests.model_specs import small_model

OpenStore = Callable[[], MetadataStore]
SLOT_BYTES = 1 << 20
_HIDDEN = Stream(0, StateKind.HIDDEN)


def make_model(model_id: str = "llama", *, tenant: str = "acme") -> ModelRecord:
    """Make a registered model with one stream."""
    spec = small_model(
        StreamSpec(_HIDDEN, 128, DType.BFLOAT16),
        model_id=model_id,
        architecture="LlamaForCausalLM",
        revision="r1",
        weights_digest="w",
        tokenizer_digest="t",
        dtype=DType.BFLOAT16,
        layer_count=2,
        hidden_size=64,
        kv_head_count=4,
        head_size=16,
        rope="theta=10000",
        norm="rms,eps=1e-05",
    )
    return ModelRecord(tenant, spec, create_time_ns=1)


def make_session(uid: int = 1, *, segment_ids: tuple[int, ...] = (), tenant: str = "acme") -> SessionRecord:
    """Make a session whose segments are all live."""
    token_count = 64 * len(segment_ids)
    return SessionRecord(
        uid=uid.to_bytes(16, "big"),
        tenant=tenant,
        session_id=f"session-{uid}",
        model_id="llama",
        layout=(TOKENS, _HIDDEN),
        generation=1 + len(segment_ids),
        segment_ids=segment_ids,
        live=((0, token_count),) if token_count else (),
        log_end=token_count,
        create_time_ns=1,
        access_time_ns=2,
        expire_time_ns=3,
        ttl_ns=None,
        is_pinned=False,
    )


def make_segment(segment_id: int = 1, *, uid: int = 1, tenant: str = "acme") -> SegmentRecord:
    """Make a segment with a slot of its own."""
    identity = SegmentIdentity(tenant, uid.to_bytes(16, "big"), 1, 0, 64, bytes(32))
    slot = Slot(0, (segment_id % (1 << 20)) * SLOT_BYTES, SLOT_BYTES)
    return SegmentRecord(segment_id, identity, slot, header_checksum=segment_id)


def contents(store: MetadataStore) -> Changes:
    """Read everything the store holds."""
    return Changes(list(store.models()), list(store.sessions()), list(store.segments()))


class MetadataContract:
    """The contract of every metadata store.

    A subclass provides the fixture `open_store`: a function that opens the same store again after
    it was closed.
    """

    async def test_a_new_store_is_empty(self, open_store: OpenStore) -> None:
        """Nothing is there before the first commit."""
        assert contents(open_store()) == Changes()

    async def test_records_come_back_as_they_went_in(self, open_store: OpenStore) -> None:
        """Every kind of record survives closing and opening, field for field."""
        put = Changes([make_model()], [make_session(segment_ids=(7,))], [make_segment(7)])
        store = open_store()
        await store.commit(put, is_durable=True)
        store.close()

        assert contents(open_store()) == put

    async def test_what_is_kept_is_read_in_full_later(self, open_store: OpenStore) -> None:
        """A look at records gives the fields that it names, and enough to read the rest from."""
        sliding = replace(make_session(1, segment_ids=(7, 9)), ttl_ns=5, live=((3, 64), (70, 90)), salt=b"s")
        put = Changes(
            sessions=[sliding, replace(make_session(2), live=()), replace(make_session(3), is_pinned=True)],
            segments=[
                make_segment(7)._replace(keys=(bytes(32), b"k" * 32)),
                make_segment(9)._replace(copy=Slot(1, SLOT_BYTES, SLOT_BYTES)),
            ],
        )
        store = open_store()
        await store.commit(put, is_durable=True)
        (sessions,), (segments,) = store.kept_sessions(), store.kept_segments()

        whole = put.sessions[:2]
        uids = [sessions.uids[begin : begin + 16] for begin in range(0, len(sessions.uids), 16)]
        read = map(store.session, uids, sessions.kept)
        assert list(read) == whole
        assert [store.session(*other) for other in sessions.others] == put.sessions[2:]
        kinds = [sessions.kinds[number] for number in sessions.kind_numbers]
        assert [(kind.tenant, kind.model_id) for kind in kinds] == [(s.tenant, s.model_id) for s in whole]
        assert kinds[0].layout == kinds[1].layout
        assert sessions.session_ids == [record.session_id for record in whole]
        assert list(sessions.segment_counts) == [2, 0]
        assert list(sessions.segment_ids) == [7, 9]
        assert list(zip(sessions.live_begins, sessions.live_ends, strict=True)) == [(3, 90), (0, 0)]
        assert list(sessions.access_times_ns) == [record.access_time_ns for record in whole]
        assert list(sessions.expire_times_ns) == [record.expire_time_ns for record in whole]

        ids = map(int, segments.segment_ids)
        assert [store.segment(i, kept) for i, kept in zip(ids, segments.kept, strict=True)] == put.segments
        assert list(segments.is_plain) == [True, False]
        columns = (
            segments.begins,
            segments.token_counts,
            segments.path_indexes,
            segments.offsets_bytes,
            segments.sizes_bytes,
            segments.segment_tokens,
        )
        assert list(zip(*columns, strict=True)) == [
            (record.identity.begin, record.identity.token_count, *record.slot, record.segment_tokens)
            for record in put.segments
        ]
        identity = put.segments[0].identity
        keyed = KeyedSegment(0, identity.tenant, identity.model_fingerprint, put.segments[0].keys)
        assert segments.keyed == [keyed]

    async def test_more_records_than_are_looked_at_at_once(self, open_store: OpenStore) -> None:
        """Each record is looked at once, in order; kinds of sessions are told apart."""
        count = 2500
        sessions = [make_session(uid, tenant=("acme", "ac")[uid % 2]) for uid in range(count)]
        put = Changes(sessions=sessions, segments=[make_segment(i) for i in range(count)])
        store = open_store()
        await store.commit(put, is_durable=True)
        found = list(store.kept_sessions())

        assert b"".join(some.uids for some in found) == b"".join(record.uid for record in sessions)
        assert [
            (some.kinds[number].tenant, session_id)
            for some in found
            for number, session_id in zip(some.kind_numbers, some.session_ids, strict=True)
        ] == [(record.tenant, record.session_id) for record in sessions]
        assert [i for some in store.kept_segments() for i in some.segment_ids] == list(range(count))

    async def test_a_commit_is_visible_at_once(self, open_store: OpenStore) -> None:
        """Records can be read back without a sync."""
        store = open_store()
        await store.commit(Changes(segments=[make_segment()]), is_durable=False)

        assert list(store.segments()) == [make_segment()]

    async def test_closing_keeps_what_was_not_durable(self, open_store: OpenStore) -> None:
        """An orderly end loses nothing."""
        store = open_store()
        await store.commit(Changes(segments=[make_segment()]), is_durable=False)
        store.close()

        assert list(open_store().segments()) == [make_segment()]

    async def test_the_last_write_of_a_key_wins(self, open_store: OpenStore) -> None:
        """A record replaces the one of its key, and only that."""
        newer = replace(make_session(1), generation=9, is_pinned=True, ttl_ns=5)
        store = open_store()
        await store.commit(Changes(sessions=[make_session(1), make_session(2)]), is_durable=False)
        await store.commit(Changes(sessions=[newer]), is_durable=True)
        store.close()

        assert list(open_store().sessions()) == [newer, make_session(2)]

    async def test_segments_come_in_the_order_of_their_ids(self, open_store: OpenStore) -> None:
        """Ids sort as numbers: 256 comes after 255, and the largest last."""
        ids = [256, 1, (1 << 64) - 1, 255, 1 << 32]
        store = open_store()
        await store.commit(Changes(segments=[make_segment(i) for i in ids]), is_durable=False)

        assert [segment.segment_id for segment in store.segments()] == sorted(ids)

    async def test_models_can_be_deleted(self, open_store: OpenStore) -> None:
        """One tenant's, and no other's of that id."""
        store = open_store()
        gone, kept = make_model("m", tenant="a"), make_model("m", tenant="b")
        await store.commit(Changes(models=[gone, kept]), is_durable=False)
        await store.commit(Changes(deleted_models=[("a", "m")]), is_durable=True)

        assert list(store.models()) == [kept]

    async def test_tenants_do_not_share_models(self, open_store: OpenStore) -> None:
        """The same model id of two tenants is two records, however the names are cut."""
        models = [make_model("bc", tenant="a"), make_model("c", tenant="ab"), make_model("bc", tenant="x")]
        store = open_store()
        await store.commit(Changes(models=models), is_durable=False)

        assert sorted(store.models(), key=lambda model: model.tenant) == models

    async def test_names_may_be_of_any_script(self, open_store: OpenStore) -> None:
        """Names are text, not ASCII."""
        model, session = make_model("模型", tenant="ключ"), make_session(tenant="ключ")
        store = open_store()
        await store.commit(Changes([model], [session], [make_segment(tenant="ключ")]), is_durable=False)

        assert contents(store) == Changes([model], [session], [make_segment(tenant="ключ")])

    async def test_deleted_records_are_gone(self, open_store: OpenStore) -> None:
        """A deletion takes its record and no other."""
        store = open_store()
        await store.commit(
            Changes(sessions=[make_session(1), make_session(2)], segments=[make_segment(1), make_segment(2)]),
            is_durable=False,
        )
        deletion = Changes(deleted_session_uids=[make_session(1).uid], deleted_segment_ids=[1])
        await store.commit(deletion, is_durable=True)
        store.close()

        assert contents(open_store()) == Changes(sessions=[make_session(2)], segments=[make_segment(2)])

    async def test_deleting_what_is_not_there_does_nothing(self, open_store: OpenStore) -> None:
        """A deletion can be repeated."""
        store = open_store()
        await store.commit(
            Changes(deleted_session_uids=[bytes(16)], deleted_segment_ids=[5]), is_durable=True
        )

        assert contents(store) == Changes()

    async def test_a_deletion_wins_over_a_record_of_the_same_commit(self, open_store: OpenStore) -> None:
        """Within one commit, deletions come last."""
        store = open_store()
        await store.commit(Changes(segments=[make_segment(1)], deleted_segment_ids=[1]), is_durable=False)

        assert contents(store) == Changes()

    async def test_nothing_can_be_committed(self, open_store: OpenStore) -> None:
        """Without changes a durable commit is a sync of those before it."""
        store = open_store()
        await store.commit(Changes(segments=[make_segment()]), is_durable=False)
        await store.commit(Changes(), is_durable=True)
        await store.commit(Changes(), is_durable=False)
        store.close()

        assert list(open_store().segments()) == [make_segment()]

    async def test_changes_may_be_reused_after_the_call(self, open_store: OpenStore) -> None:
        """A commit keeps nothing of the caller's lists."""
        changes = Changes(segments=[make_segment(1)])
        store = open_store()
        await store.commit(changes, is_durable=False)
        changes.segments.clear()
        await store.commit(Changes(), is_durable=True)
        store.close()

        assert list(open_store().segments()) == [make_segment(1)]

    async def test_many_durable_commits_at_once_all_land(self, open_store: OpenStore) -> None:
        """Callers that share a sync all have what they committed, in the order of their calls."""
        store = open_store()
        commits = [
            Changes(sessions=[replace(make_session(), generation=i)], segments=[make_segment(i)])
            for i in range(200)
        ]
        await asyncio.gather(*(store.commit(changes, is_durable=True) for changes in commits))
        store.close()

        again = open_store()
        assert [session.generation for session in again.sessions()] == [199]
        assert [segment.segment_id for segment in again.segments()] == list(range(200))

    async def test_one_cancelled_commit_does_not_hurt_the_others(self, open_store: OpenStore) -> None:
        """Callers share a sync, not each other's cancellation."""
        store = open_store()
        commits = [
            asyncio.ensure_future(store.commit(Changes(segments=[make_segment(i)]), is_durable=True))
            for i in range(20)
        ]
        asyncio.get_running_loop().call_soon(commits[10].cancel)  # after the first step of each
        results = await asyncio.gather(*commits, return_exceptions=True)

        assert [i for i, result in enumerate(results) if result is not None] in ([10], [])
        assert len(list(store.segments())) == 20

    async def test_a_large_session_is_kept_whole(self, open_store: OpenStore) -> None:
        """A session of a million tokens is one record like any other."""
        large = make_session(segment_ids=tuple(range(1 << 40, (1 << 40) + (1 << 14))))
        store = open_store()
        await store.commit(Changes(sessions=[large]), is_durable=True)
        store.close()

        assert list(open_store().sessions()) == [large]
