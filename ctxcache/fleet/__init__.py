"""The fleet: this store among those of other hosts. Owned by the event loop.

    services ──► Fleet (whereabouts) ──► Claims ──► register         who continues a session
                   │                        ├─────► Asking           its owner, over gRPC
                   │                        └─────► HostCopies       what is here
                   │                                    └── Arrival ◄── bulk channel of the owner, or objects
                   ├── Sharing ─────► objects of the bucket
                   ├── Borrowing ───► other stores                   prompts without a name
                   └── Collecting ──► register and objects           what nobody needs any more

`core/fleet/` decides; what a decision does to sessions and sockets is here. Worst case: the bucket does not
answer; the sessions that are here are served on, and what another host has is computed.
"""

import asyncio
import logging
import secrets
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from ctxcache.cache import Cache
from ctxcache.cache.state import Pace, part_of_work
from ctxcache.client.credentials import ClientTls, OwnTokenFile
from ctxcache.core.fleet.claims import Claims, FleetFacts, Left, Loss, Verdict
from ctxcache.core.fleet.heads import NODES, ForeignObject, Name, NodeRecord, Secret, away_path
from ctxcache.core.fleet.register import NoAnswer, Register, put
from ctxcache.core.fleet.tenure import Tenure
from ctxcache.core.fleet.worth import Worth
from ctxcache.core.history import Event
from ctxcache.core.ledger.session import HIDDEN, Session
from ctxcache.core.ledger.work import at_work
from ctxcache.errors import (
    CacheError,
    InvalidConfiguration,
    SessionMoved,
    SessionNotFound,
    Unavailable,
)
from ctxcache.fleet.arrival import Arrival
from ctxcache.fleet.borrowing import Borrowing
from ctxcache.fleet.collecting import SHARDS, Collecting
from ctxcache.fleet.copies import HostCopies
from ctxcache.fleet.peers import Asking, Former
from ctxcache.fleet.sharing import Price, Sharing
from ctxcache.fleet.sources import Offer, Source, Spare
from ctxcache.runtime.threads import started_pool
from ctxcache.service.admission import Admission
from ctxcache.service.fairness import LoopSlice, Turns
from ctxcache.service.whereabouts import Wanted
from ctxcache.storage.bucket_probe import FEW_RACERS, probe
from ctxcache.storage.objects import Objects
from ctxcache.v1 import operations_pb2, peer_pb2

log = logging.getLogger(__name__)
PUBLISH_INTERVAL_S = 1.0
FORGET_INTERVAL_S = 60.0
BEATS_OF_DOUBT = 3
"""Beats that may fail before this host asks the bucket for each session again."""
BEATS_BETWEEN_LOOKS = 10
ARRIVALS = 16
"""Sessions that come at a time."""
PROVEN_FOR_S = 86400.0
"""How long a bucket is taken to honour conditions before it is tried again."""
COMING_AT_ONCE = 64
"""Sessions of one look-up that are asked for at a time."""
ANNOUNCED_AT_ONCE = 16
BURIED_AT_ONCE = 256
FORGOTTEN_PER_SLICE = 1000
COLLECT_INTERVAL_S = 3600.0
PROBLEMS_TOLD = 100
SAVE_WAIT_S = 1.0
"""How long a turn waits for the one before to be saved at another store. Then it is computed alone."""
LOOK_INTERVAL_S = 0.1
FLEET = "v1/fleet"
"""The path of the object by which a store finds out whether the bucket is of its fleet."""


@dataclass(frozen=True, slots=True)
class FleetNode:
    """Another store of the fleet, or this one, by its last beat."""

    record: NodeRecord
    is_self: bool
    problem: str = ""


class Fleet:
    """This store's place among others. See `Whereabouts` for what the services ask of it."""

    def __init__(
        self,
        cache: Cache,
        register: Register,
        secret: Secret,
        *,
        bucket: str,
        node: str,
        beat_s: float,
        tls: ClientTls | None,
        token: OwnTokenFile | None,
        objects: Objects,
        is_sharing: bool,
        share_price: Price | None,
        share_bytes_per_s: int,
        is_telling: bool,
        prefill_tokens_per_s: float,
    ) -> None:
        """`is_sharing`: every session is shared behind its turns, by its price where there is one.

        `is_telling`: the bucket knows prefixes.
        """
        self._cache, self._register, self._secret, self._bucket = cache, register, secret, bucket
        self._beat_s, self._turns = beat_s, Turns()
        # A count of their own: clients' streams are no reason to lose a session that comes.
        self._calls = Admission("arrivals", ARRIVALS)
        self._arriving = asyncio.Semaphore(ARRIVALS)
        self._threads: ThreadPoolExecutor = started_pool(ARRIVALS, "fleet")
        self._asking = Asking(tls, token, self._stored)
        self.copies = HostCopies(
            cache,
            self._threads,
            self._turns,
            self._spawn,
            calls=self._calls,
            arriving=self._arriving,
            parts_of=self._parts_of,
            arrived=self._arrived,
            stored=self._source_of,
            spare=self._spare_of,
        )
        self.claims = Claims(
            register,
            secret,
            self._asking,
            self.copies,
            node=node,
            incarnation=secrets.token_hex(8),
            address="",
            nonce=partial(secrets.token_hex, 8),
            new_uid=lambda: uuid.uuid4().hex,
        )
        self.sharing = Sharing(
            cache,
            objects,
            secret,
            self.claims,
            self._settle,
            self._threads,
            self._spawn,
            turns=self._turns,
            bucket=bucket,
            is_asked_always=is_sharing,
            price=share_price,
            bytes_per_s=share_bytes_per_s,
        )
        self.borrowing = Borrowing(
            cache,
            register,
            secret,
            self.claims,
            self._asking,
            self._records,
            self._threads,
            Worth(prefill_tokens_per_s),
            calls=self._calls,
            arriving=self._arriving,
            is_telling=is_telling,
        )
        cache.state.committed = self._committed
        cache.state.dropped = partial(self.sharing.changed, is_cut=True)
        self.collecting = Collecting(register, objects, secret, self.claims, self._is_settled, self._ended_at)
        self._announcing: set[Name] = set()
        """Sessions whose heads are written now."""
        self._burying = 0
        self._settling: dict[Name, asyncio.Task[Verdict]] = {}
        self._background: set[asyncio.Task[object]] = set()
        self._heard_s = time.monotonic()
        self._proven_s = 0.0
        """When the bucket was last found to honour conditions."""
        self.problem = ""
        """Why the bucket was not heard at the last beat; empty where it was."""
        self.superseded = asyncio.Event()
        """Set when another process has this store's name, and this one has to end."""

    # -- from the start to the end -------------------------------------------------------------------

    async def open(self, address: str) -> None:
        """Take this store's place. A bucket without an answer is waited for in the background.

        `address`: where other stores reach this one. Raises InvalidConfiguration for a bucket that ignores
        conditions, or is of another fleet.
        """
        self.claims.address = address
        try:
            await self._prove()
            await at_work(self.claims.beat())
            # The probe may have taken longer than beats may fail.
            self._heard_s = time.monotonic()
        except NoAnswer as error:
            self._note_silence(error)
        except ForeignObject as error:
            raise InvalidConfiguration(source="fleet_bucket", problem=str(error)) from error

    async def _prove(self) -> None:
        """Raise InvalidConfiguration, ForeignObject or NoAnswer unless the bucket is what a fleet needs."""
        if self._proven_s and time.monotonic() - self._proven_s < PROVEN_FOR_S:
            return
        for tried in await probe(self._register, FEW_RACERS):
            if tried.is_silent:
                raise NoAnswer(tried.problem)
            if tried.problem:
                problem = f"no fleet can rest on this bucket: {tried.problem}"
                raise InvalidConfiguration(source="fleet_bucket", problem=problem)
        mark = self._secret.write(NodeRecord("fleet", "", "", 0, ""))
        found = await put(self._register, FLEET, mark, None)
        if found is not None:
            self._secret.read_node(found.body)
        self._proven_s = time.monotonic()

    async def run(self) -> None:
        """Beat, publish and tidy up for ever; ends by cancellation."""
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self._beat())
            loops.create_task(self._publish())
            loops.create_task(self._forget())
            loops.create_task(self.sharing.run())
            loops.create_task(self.borrowing.run())
            loops.create_task(self._collect())
            loops.create_task(self._look_after())

    async def close(self) -> None:
        """End what runs. Nothing is given up: the sessions are this host's when it comes back."""
        for task in (*self._settling.values(), *self._background):
            task.cancel()
        await asyncio.gather(*self._settling.values(), *self._background, return_exceptions=True)
        self._asking.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._beat_s)
            try:
                await self._prove()
                if not await at_work(self.claims.beat()):
                    log.error("fleet_superseded node=%s", self.claims.node)
                    self.superseded.set()
                    return
            except NoAnswer as error:
                self._note_silence(error)
            except (ForeignObject, CacheError) as error:
                self.problem = str(error)
                log.error("fleet_bucket_unusable error=%s", error)  # noqa: TRY400  the sentence says all
                self.claims.doubt()
            else:
                self._heard_s = time.monotonic()
                if self.problem:
                    log.info("fleet_bucket_heard_again")
                self.problem = ""

    def _note_silence(self, error: NoAnswer) -> None:
        if not self.problem:
            log.warning("fleet_bucket_silent error=%s", error)
        self.problem = str(error) or "no answer"
        self._look_at_the_clock()

    # Also where no beat has ended: one may wait long for its answer, and a host may have slept.
    def _look_at_the_clock(self) -> None:
        if time.monotonic() - self._heard_s > BEATS_OF_DOUBT * self._beat_s:
            self.claims.doubt()

    async def _publish(self) -> None:
        while True:
            await asyncio.sleep(PUBLISH_INTERVAL_S)
            names = [name for name in self.claims.private() if name not in self._settling]
            for begin in range(0, len(names), ANNOUNCED_AT_ONCE):
                some = names[begin : begin + ANNOUNCED_AT_ONCE]
                heard = await asyncio.gather(*(at_work(self._announce(name)) for name in some))
                # Where there is no answer, all the others do not ask again at once.
                if not all(heard):
                    break

    async def _forget(self) -> None:
        while True:
            await asyncio.sleep(FORGET_INTERVAL_S)
            try:
                await at_work(self.claims.reclaim())
            except (NoAnswer, ForeignObject) as error:
                log.warning("fleet_not_reclaimed error=%s", error)
            names = self.claims.names()
            for begin in range(0, len(names), FORGOTTEN_PER_SLICE):
                some = names[begin : begin + FORGOTTEN_PER_SLICE]
                gone = [n for n in some if self.copies.session(n) is None and n not in self._settling]
                await at_work(self._bury_expired(gone))
                self.claims.forget(
                    n for n in gone if self.copies.session(n) is None and n not in self._settling
                )
                await asyncio.sleep(0)
            self.copies.forget_ended()

    # A copy that another host took would else stay until somebody asks for it, for as long as it lives.
    async def _look_after(self) -> None:
        """Look at the heads of what was taken from this host, also while it did not run."""
        while True:
            await asyncio.sleep(BEATS_BETWEEN_LOOKS * self._beat_s)
            due = self.claims.noted()
            was_away, taken = self.claims.was_away, self.claims.taken_before
            if was_away or taken != ():
                paths = None if was_away or taken is None else frozenset(taken)
                due += [
                    name
                    async for name in self._names()
                    if paths is None or self._secret.head_path(name) in paths
                ]
            if not await self._looked_after(due):
                continue
            self.claims.taken_before = ()
            if was_away:
                with suppress(NoAnswer):
                    await self._register.remove(away_path(self.claims.node))
                    self.claims.was_away = False

    def _is_settled(self) -> bool:
        self._look_at_the_clock()
        return self.claims.is_settled

    async def _looked_after(self, names: Sequence[Name]) -> bool:
        for begin in range(0, len(names), ANNOUNCED_AT_ONCE):
            some = names[begin : begin + ANNOUNCED_AT_ONCE]
            if not all(await asyncio.gather(*(at_work(self.claims.look_after(name)) for name in some))):
                return False
        return True

    async def _names(self) -> AsyncIterator[Name]:
        """Every session that has a name here; others have their turns meanwhile."""
        names, pace = self._cache.ledger.names, LoopSlice(self._turns)
        for tenant in sorted(names.tenants()):
            for session_id in list(names.ids(tenant)):
                if not session_id.startswith(HIDDEN):
                    yield Name(tenant, session_id)
                if pace.is_over:
                    await pace.rest()

    async def ended(self, paths: Sequence[str]) -> Sequence[str]:
        """Those of these heads that name no session here."""
        left = set(paths)
        async for name in self._names():
            left.discard(self._secret.head_path(name))
        return sorted(left - self.claims.moving())

    async def _ended_at(self, node: str, address: str, paths: Sequence[str]) -> Sequence[str]:
        if node == self.claims.node:
            return await at_work(self.ended(paths))
        return await self._asking.ended(address, paths)

    async def _collect(self) -> None:
        while True:
            # Not all at once, where many have started together.
            await asyncio.sleep(COLLECT_INTERVAL_S / 2 + secrets.randbelow(int(COLLECT_INTERVAL_S)))
            try:
                if await self.collecting.is_due():
                    async for collected in self.collecting.collect():
                        if collected.shard_count == len(SHARDS):
                            log.info(
                                "fleet_collected sessions=%d objects=%d garbage=%d expired=%d dead_heads=%d "
                                "away_stores=%d problems=%d",
                                collected.session_count,
                                collected.object_count,
                                collected.garbage_object_count,
                                collected.expired_session_count,
                                collected.dead_head_count,
                                collected.away_store_count,
                                len(collected.problems),
                            )
            except (NoAnswer, ForeignObject) as error:
                log.warning("fleet_not_collected error=%s", error)

    async def collect(
        self, *, grace_s: float, is_dry_run: bool
    ) -> AsyncGenerator[operations_pb2.CollectFleetResponse]:
        """Collect what no head names, or say what would be. Raises Unavailable."""
        try:
            async for collected in self.collecting.collect(grace_s=grace_s, is_dry_run=is_dry_run):
                yield operations_pb2.CollectFleetResponse(
                    shared_session_count=collected.session_count,
                    object_count=collected.object_count,
                    size_bytes=collected.size_bytes,
                    garbage_object_count=collected.garbage_object_count,
                    garbage_bytes=collected.garbage_bytes,
                    expired_session_count=collected.expired_session_count,
                    busy_session_count=collected.busy_session_count,
                    problems=collected.problems[:PROBLEMS_TOLD],
                    done_percent=100 * collected.shard_count // len(SHARDS),
                    dead_head_count=collected.dead_head_count,
                    away_store_count=collected.away_store_count,
                )
        except NoAnswer as error:
            raise Unavailable(target=self._bucket, problem=str(error)) from error

    async def publish_all(self, *, has_rows: bool) -> AsyncGenerator[operations_pb2.PublishSessionsResponse]:
        """Have the bucket know of every session that is here; yields how far it is."""
        names = [name async for name in self._names()]
        told = operations_pb2.PublishSessionsResponse(session_count=len(names))
        yield told
        for begin in range(0, len(names), ANNOUNCED_AT_ONCE):
            some = names[begin : begin + ANNOUNCED_AT_ONCE]
            ends = await asyncio.gather(
                *(at_work(self._made_known(name, has_rows=has_rows)) for name in some), return_exceptions=True
            )
            told.done_count += len(some)
            for end in ends:
                if end is None:
                    told.published_count += 1
                elif isinstance(end, (SessionMoved, SessionNotFound)):
                    told.elsewhere_count += 1
                elif isinstance(end, CacheError):
                    told.failed_count, told.problem = told.failed_count + 1, str(end)
                else:
                    raise end
            yield told

    async def _made_known(self, name: Name, *, has_rows: bool) -> None:
        """Have the bucket know of a session. Raises as `Sharing.share`."""
        if has_rows:
            await self.sharing.share(name)
            return
        if self.copies.session(name) is None:
            raise SessionNotFound(session=f"sessions/{name.session_id}")
        try:
            await self.sharing.own(name)
        except (NoAnswer, ForeignObject) as error:
            raise Unavailable(target=self._bucket, problem=str(error)) from error

    async def _bury_expired(self, gone: Iterable[Name]) -> None:
        """Remove the objects of sessions that have expired here. Objects of evicted sessions stay."""
        for name in gone:
            shared = self.claims.shared(name)
            if not shared:
                continue
            try:
                await self.sharing.stored(name, shared)
            except Left:
                await self._bury(name)
            except NoAnswer as error:
                log.warning("fleet_expired_not_removed error=%s", error)

    # -- what the services ask -----------------------------------------------------------------------

    def is_here(self, tenant: str, session_id: str) -> bool:
        """See Whereabouts."""
        self._look_at_the_clock()
        return self.claims.is_here(Name(tenant, session_id))

    async def come(self, tenant: str, session_id: str) -> None:
        """See Whereabouts."""
        # The server chooses a name that nobody has.
        if not session_id or self.is_here(tenant, session_id):
            return
        if await self._settle(Name(tenant, session_id)) is Verdict.ELSEWHERE:
            raise SessionMoved(session=f"sessions/{session_id}")

    async def all_come(self, tenant: str, session_ids: Iterable[str]) -> None:
        """See Whereabouts."""
        away = [Name(tenant, one) for one in session_ids if not self.is_here(tenant, one)]
        for begin in range(0, len(away), COMING_AT_ONCE):
            verdicts = await asyncio.gather(*map(self._settle, away[begin : begin + COMING_AT_ONCE]))
            # The bucket is silent. The caller has waited for that once, and once is enough.
            if Verdict.UNKNOWN in verdicts:
                return

    async def created(self, tenant: str, session_id: str) -> None:
        """See Whereabouts."""
        name = Name(tenant, session_id)
        # What another host had is taken over before the session is used. Else nobody waits for its head.
        if self.claims.created(name):
            if await self._published(name) is Verdict.ELSEWHERE:
                raise SessionMoved(session=f"sessions/{session_id}")
        # With more of them, or a bucket that is slow, it is the publisher's turn within a second.
        elif len(self._announcing) < ANNOUNCED_AT_ONCE:
            self._spawn(self._announce(name))

    async def _announce(self, name: Name) -> bool:
        """Write the head of a session that was created here. False: the bucket does not answer."""
        if name in self._announcing:
            return True
        self._announcing.add(name)
        try:
            return await self._published(name) is not Verdict.UNKNOWN
        finally:
            self._announcing.discard(name)

    async def _published(self, name: Name) -> Verdict:
        try:
            return await self.claims.publish(name)
        except ForeignObject as error:
            log.error("fleet_head_unreadable error=%s", error)  # noqa: TRY400  the sentence says all
            return Verdict.ABSENT

    async def ending(self, tenant: str, session_id: str) -> None:
        """See Whereabouts."""
        name = Name(tenant, session_id)
        try:
            shared = await self.claims.bury_first(name)
        except NoAnswer as error:
            raise Unavailable(target=self._bucket, problem=str(error)) from error
        if shared:
            self._spawn(self.sharing.removed(name, shared))

    async def prefix_comes(self, tenant: str, wanted: Wanted, pace: Pace) -> None:
        """See Whereabouts."""
        await self.borrowing.come(tenant, wanted, pace)

    def check_shares(self) -> None:
        """See Whereabouts."""

    async def share(self, tenant: str, session_id: str) -> None:
        """See Whereabouts."""
        await self.sharing.share(Name(tenant, session_id))

    async def _stored(self, name: Name, shared: str) -> Offer:
        return await self.sharing.stored(name, shared)

    def deleted(self, tenant: str, session_id: str) -> None:
        """See Whereabouts."""
        # One that is not buried is looked for here in vain, and is absent then, too.
        if self._burying < BURIED_AT_ONCE:
            self._burying += 1
            self._spawn(self._bury_one(Name(tenant, session_id)))

    async def _bury_one(self, name: Name) -> None:
        try:
            await self._bury(name)
        finally:
            self._burying -= 1

    async def _bury(self, name: Name) -> None:
        try:
            shared = await self.claims.bury(name)
            if shared:
                await self.sharing.removed(name, shared)
        except NoAnswer as error:
            log.warning("fleet_head_not_buried error=%s", error)

    async def _settle(self, name: Name) -> Verdict:
        """Settle a name; those who ask for one meanwhile wait for the same answer."""
        task = self._settling.get(name)
        if task is None:
            settled = at_work(self._settled(name))
            task = self._settling[name] = asyncio.get_running_loop().create_task(settled)
            task.add_done_callback(lambda _: self._settling.pop(name, None))
        # A caller that goes away ends no other caller's wait.
        return await asyncio.shield(task)

    async def _settled(self, name: Name) -> Verdict:
        begun = time.monotonic()
        try:
            verdict = await self.claims.settle(name)
            # The turn before may still be being saved where it ran.
            while verdict is Verdict.ELSEWHERE and time.monotonic() < begun + SAVE_WAIT_S:
                await asyncio.sleep(LOOK_INTERVAL_S)
                verdict = await self.claims.settle(name)
        except ForeignObject as error:
            log.error("fleet_head_unreadable error=%s", error)  # noqa: TRY400  the sentence says all
            return Verdict.ABSENT
        loss = self.claims.losses.get(name)
        if verdict is Verdict.ABSENT and loss is Loss.OWNER_LOST:
            self._note(name, Event.OWNER_LOST, "its host does not answer")
        return verdict

    def _note(self, name: Name, event: Event, detail: str) -> None:
        clock = self._cache.state.clock
        self._cache.state.journal.history.note(
            name.tenant,
            name.session_id,
            event,
            time_ns=clock.wall_ns(),
            detail=detail,
            token_count=0,
            trace_id="",
        )

    # -- what other stores ask -----------------------------------------------------------------------

    def give_up(self, name: Name, uid: str, term: int) -> tuple[Session, Former]:
        """Make a guest of a session that another store takes over, and tell what it was.

        Raises Busy, Left.
        """
        self.claims.yielded(name, uid, term)
        return self.copies.former(uid)

    async def describe(self) -> operations_pb2.Fleet:
        """All that an operator asks. Raises Unavailable."""
        counts, tenures = self.claims.counts, self.tenures()
        try:
            nodes = sorted(await self.nodes(), key=lambda node: node.record.node)
        except NoAnswer as error:
            raise Unavailable(target=self._bucket, problem=str(error)) from error
        answers = await asyncio.gather(*(self._asking.problem_of(node.record.address) for node in nodes))
        return operations_pb2.Fleet(
            node=self.claims.node,
            bucket=self._bucket,
            is_sure=self.claims.is_sure,
            problem=self.problem,
            private_session_count=tenures[Tenure.PRIVATE],
            owned_session_count=tenures[Tenure.OWNED],
            unsure_session_count=tenures[Tenure.UNSURE],
            guest_count=tenures[Tenure.GUEST],
            arrived_session_count=counts.arrived,
            arrived_token_count=counts.arrived_tokens,
            arrived_bytes=counts.arrived_bytes,
            yielded_session_count=counts.yielded,
            superseded_session_count=counts.superseded,
            owner_lost_count=counts.taken_from_silent,
            head_read_count=counts.head_reads,
            head_change_count=counts.head_changes,
            no_answer_count=counts.no_answers,
            restored_session_count=counts.arrived_stored,
            shared_object_count=counts.shared_objects,
            shared_bytes=counts.shared_bytes,
            unshared_session_count=self.sharing.waiting_count,
            share_failure_count=counts.share_failures,
            removed_object_count=counts.removed_objects,
            borrowed_prefix_count=counts.borrowed_prefixes,
            borrowed_token_count=counts.borrowed_tokens,
            lent_prefix_count=counts.lent_prefixes,
            told_prefix_count=counts.told_prefixes,
            nodes=[
                operations_pb2.FleetNode(
                    node=node.record.node,
                    address=node.record.address,
                    beat=node.record.beat,
                    is_self=node.is_self,
                    taken_session_count=len(node.record.taken or ()),
                    is_answering=not (node.problem or problem),
                    problem=node.problem or problem,
                )
                for node, problem in zip(nodes, answers, strict=True)
            ],
        )

    async def nodes(self) -> list[FleetNode]:
        """The stores that have said where they are. Raises NoAnswer."""
        found = []
        async for path in self._register.paths(NODES):
            entry = await self._register.get(path)
            if entry is None:
                continue
            try:
                record = self._secret.read_node(entry.body)
            except ForeignObject as error:
                record = NodeRecord(path.removeprefix(NODES), "", "", 0, "")
                found.append(FleetNode(record, is_self=False, problem=str(error)))
                continue
            found.append(FleetNode(record, is_self=record.node == self.claims.node))
        return found

    async def _records(self) -> list[NodeRecord]:
        return [node.record for node in await self.nodes()]

    def facts(self) -> FleetFacts:
        """This store's place in the fleet."""
        self._look_at_the_clock()
        return FleetFacts(self.claims.counts, self.tenures(), self.claims.is_sure, self.sharing.waiting_count)

    def tenures(self) -> Counter[Tenure]:
        """Sessions with names by tenure, and guests since the start."""
        counts = Counter(self.claims.tenures())
        counts[Tenure.GUEST] = self.copies.guest_count
        return counts

    def _committed(self, session: Session) -> None:
        self.sharing.changed(session, is_cut=False)
        self.borrowing.committed(session)

    def _parts_of(self, session: Session) -> Iterable[peer_pb2.SharedPart]:
        return self.sharing.parts_of(session)

    def _source_of(self, name: Name, offer: Offer, begin: int, spare: Spare | None) -> Source:
        return self.sharing.source(name, offer, begin, spare)

    async def _spare_of(self, name: Name, offer: Offer, begin: int) -> Spare | None:
        return await self.sharing.spare(name, offer, begin)

    def _arrived(self, name: Name, uid: str, offer: Offer, arrival: Arrival) -> None:
        counts = self.claims.counts
        counts.arrived_tokens += arrival.token_count
        counts.arrived_bytes += arrival.size_bytes
        counts.arrived_stored += not offer.tcp_port
        self.sharing.arrived(name, uid, offer, arrival.token_count)

    def _spawn(self, work: Coroutine[Any, Any, object]) -> None:
        task = part_of_work(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
