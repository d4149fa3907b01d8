"""Metadata in RocksDB: every commit through its log, and many commits per write of the log and per sync.

    commit ──► waits ──► in memory ──► in the log ──► synced
                 while the log is written      where it is durable

Knows records (`records.py` documents keys and values) and nothing of what they mean. Worst case:
the device refuses a write or a sync; the store is then fenced, every later commit raises
TierFailure, and only a restart, which reads what is really there, lifts that.

A write that lacked descriptors, room, inodes or memory makes the store rest: commits raise TierFailure as
well, and their changes are owed. When the cause is gone the database is opened again, compared with the
acknowledged commits, and given the owed changes in one commit. A device that does not answer makes the store
rest too, until it has answered.

The database's own calls keep the interpreter, all but the two that write and sync its log. So a commit goes
to memory on the event loop, and its log is written in a thread. The database's lock is held meanwhile: the
next commit goes to memory when that thread is back.

A record is never dropped in silence: the log is replayed in the mode that refuses damage before
its end, tables are checksummed by RocksDB, and every value carries its own checksum besides. Each commit
has a number, and notes how many sessions there are and a digest of their records, so that a database
that lost a file and does not know it is refused: by its witness, by its catalog when all is gone, or when
its sessions are read. What is refused is as it was: a database is opened for writing behind all that
(`reading.py` says why), at a start as after a rest.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from rocksdict import Rdict, WriteBatch

from ctxcache.errors import DataDirectoryUnusable, TierFailure
from ctxcache.format.layout import Slot
from ctxcache.runtime.clock import SystemClock
from ctxcache.runtime.files import claim_directory, open_private
from ctxcache.storage.device_threads import Threads
from ctxcache.storage.metadata import records
from ctxcache.storage.metadata.base import Changes
from ctxcache.storage.metadata.catalog import HANG_AFTER_S, Beside, Catalog, Entry
from ctxcache.storage.metadata.reading import (
    RocksDbRecords,
    Untouched,
    options,
    refuse,
    release,
)
from ctxcache.storage.metadata.records import Commit, Seals
from ctxcache.storage.metadata.shortages import Room, check_room_to_open, has_what_lacked, is_passing
from ctxcache.storage.metadata.witness import PATIENCE_S as WITNESS_PATIENCE_S
from ctxcache.storage.metadata.witness import Witness

# The steps of a commit, and what it survives at each:
#
#     in memory     RocksDB's memtable, on the event loop     nothing
#     in the log    flush_wal(sync=False), in a thread        the death of the process
#     synced        flush_wal(sync=True), behind it           a power cut
#     witnessed     a number in each SSD directory            a database that lost it and does not know
#
# Callers that come while the log is written or synced are one round: one write for all of them, one sync
# where one of them is durable, and one write of the catalog.
REOPEN_PAUSE_S = 1.0
"""Time between two looks at whether the cause of a rest is gone."""
ENTRIES_PER_BATCH = 1024
PROPERTIES = {
    "memtable_bytes": "cur-size-all-mem-tables",
    "table_bytes": "total-sst-files-size",
    "pending_compaction_bytes": "estimate-pending-compaction-bytes",
    "running_compactions": "num-running-compactions",
    "background_errors": "background-errors",
    "keys": "estimate-num-keys",
    "is_write_stopped": "is-write-stopped",
}
"""The published figures of RocksDB, and RocksDB's own names for them."""
END_PATIENCE_S = 5.0
"""How long the end waits for a device that does not answer, at most as long as a commit does."""
Found = TypeVar("Found")
log = logging.getLogger(__name__)


# A round is the only step between memory and log: while one is under way, commits wait in `_waiting`.
#
#     commit a, b ──► round 1: in memory, log being written and synced
#     commit c, d ──► _waiting ──► round 2 when round 1 is where it must be
#
# If round 1 fails, all four are refused. Which of a and b arrived is not known until the database is opened
# anew: they are `_doubtful`.
@dataclass(slots=True)
class _Round:
    """Commits that go into the log together. They are in memory."""

    done: "asyncio.Future[Future[None] | None]"
    """Ends when the log has the commits. Its result is the catalog's write of them."""
    is_durable: bool
    commits: list[tuple[Sequence[Entry], Commit]] = field(default_factory=list)
    work: "Future[None] | None" = None
    noted: Beside | None = None
    """The catalog's bytes of the commits, where the log's thread writes these too."""


class RocksDbMetadata(RocksDbRecords):
    """See MetadataStore. One process at a time; owned by the event loop, but for its threads."""

    def __init__(
        self,
        path: str | Path,
        *,
        witness: Witness | None = None,
        catalog: Catalog | None = None,
        hang_after_s: float = HANG_AFTER_S,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Create the database in directory `path`, or open one that is there for reading, until `begin`.

        `hang_after_s` is how long the device may take for one answer. `before` is called right before the
        database is written: it writes the store's other files. Raises as RocksDbRecords and `before` do.
        """
        super().__init__(path, witness=witness, catalog=catalog)
        self._hang_after_s, self._clock, self._before = hang_after_s, SystemClock(), before
        # A sync waits for the witnesses too, whose devices may hang while this one does not.
        self.patience_s = hang_after_s + (WITNESS_PATIENCE_S if witness else 0)
        # One thread writes the log and syncs it: a thread between the two would cost more than the write.
        self._writer = Threads(1, "metadata-log", self._clock)
        self._beside = Threads(1, "metadata-beside", self._clock)
        """Opens and scans the database, and asks the filesystem. No commit waits for this thread."""
        self._threads = self._writer, self._beside
        self._waiting: list[Sequence[Entry]] = []
        """Changes of commits that came while the log was written."""
        self._waiting_done: asyncio.Future[Future[None] | None] | None = None
        """Ends when the log has them."""
        self._is_waiting_durable = False
        """Whether a waiting commit has to outlive a power cut."""
        self._round: _Round | None = None
        """Commits whose log is being written."""
        self._watch: asyncio.TimerHandle | None = None
        """Set while the device has something to answer."""
        self._failure: str | None = None
        self._is_resting = False
        """Whether the failure passes by itself."""
        self._next_look_s = 0.0
        self._owed: dict[bytes, bytes | None] = {}
        """Records by key of commits that were refused during a rest. The cache has gone on from them.

        By key, so that many refused commits of one session cost one record.
        """
        self._doubtful: list[tuple[Sequence[Entry], Commit]] = []
        """Commits whose write began the rest. The database may have the first of them."""
        self.reopened_count = 0
        """How often a rest has ended."""
        self._is_closed = self._is_begun = False
        # A failure here must give up the lock of the directory, or the next try would find it held.
        try:
            _claim(self._path)
            self._room = Room(self._path, self._beside)
            if not self.is_there:
                self._seals = Seals()
                self._open_for_writing(is_new=True)
        except BaseException:
            for threads in self._threads:
                threads.close()
            self._let_go()
            raise

    def begin(self) -> None:
        """See MetadataStore."""
        if self._is_begun:
            return
        if self._seals is None:
            for _ in self.sessions():
                # The commit's own record is compared at the end with what the last commit noted.
                continue
        # RocksDB would stop half way and leave files behind, one more at each try.
        check_room_to_open(Path(self._path))
        self._let_go()
        self._open_for_writing()

    def _open_for_writing(self, *, is_new: bool = False) -> None:
        # The checks come before RocksDB tidies up: a refused database is as it was.
        check_lock(Path(self._path))
        if self._witness:
            self._witness.begin()
        if self._catalog:
            self._catalog.claim()
        self._before()
        try:
            self.database = Rdict(self._path, options(is_new=is_new))
        except Exception as error:  # noqa: BLE001  rocksdict raises nothing narrower
            refuse(self._path, error)
        try:
            if self._catalog:
                # Each run says with its first commit where its catalog goes on.
                self._catalog.begin(self._last.sequence, self.raw)
        except BaseException:
            release(self.database)
            raise
        self._is_begun = True
        if not self._is_counted and self._witness:
            # The store is witnessed at once: from now on it cannot be gone unnoticed.
            self._write_now([])
            self._sync_now()

    @property
    def commit_count(self) -> int:
        """Commits since the store was new."""
        return self._last.sequence

    @property
    def is_fenced(self) -> bool:
        """Whether the store takes no changes, since a write or a sync has failed."""
        return self._failure is not None

    @property
    def problem(self) -> str:
        """Why the store takes no changes; empty while it does."""
        if self._failure is None:
            return ""
        if self._is_resting:
            return f"resting until it has passed: {self._failure}"
        return f"fenced after a failed write or sync: {self._failure}"

    def properties(self) -> dict[str, int]:
        """RocksDB's figures, by our names. From any thread, until `close`."""
        database = self.database
        try:
            return {
                name: database.property_int_value(f"rocksdb.{theirs}") or 0
                for name, theirs in PROPERTIES.items()
            }
        except Exception:  # rocksdict raises nothing narrower
            if not self._is_resting:
                raise
            # The database is closed, until it can be opened again.
            return dict.fromkeys(PROPERTIES, 0)

    def check(self, *, is_growing: bool = True) -> None:
        """See MetadataStore. One statvfs."""
        self._check()
        if is_growing:
            # Only growth needs room: deletions must go on when the disk is full, for they make room.
            self._room.check()

    def restore(self, entries: Iterable[Entry], sequence: int) -> None:
        """Put records into a store that is new; its commits are numbered from `sequence` on.

        Durable once the store is closed. Raises TierFailure.
        """
        # Every session is counted from nothing.
        self._seals, self._written = Seals(), Commit(sequence, 0, 0)
        remaining = iter(entries)
        # The commit number counts also where there are no records.
        self._write_now([])
        while batch := list(islice(remaining, ENTRIES_PER_BATCH)):
            self._write_now(batch)

    def commit(self, changes: Changes, *, is_durable: bool) -> Coroutine[Any, Any, None]:
        """See MetadataStore. On the loop it costs tens of microseconds.

        Threads write the log and the catalog to the page cache. Await the result to know that both, and the
        sync of a durable commit, are done.
        """
        entries = records.entries(changes)
        if self._is_resting:
            # The cache goes on from these changes: the end of the rest writes them first.
            self._owed.update(entries)
        self._check()
        if not self._is_begun:
            self.begin()
        return self._settle(self._put(entries, is_durable=is_durable))

    async def _settle(self, done: "asyncio.Future[Future[None] | None]") -> None:
        """Wait until the log and the catalog have a commit's changes."""
        # The wait is shielded: one caller's cancellation must not cancel what others wait for.
        noted = await asyncio.shield(done)
        if self._catalog and noted:
            await self._catalog.wait(noted)

    # -- into the log ------------------------------------------------------------------------------

    def _put(self, entries: Sequence[Entry], *, is_durable: bool) -> "asyncio.Future[Future[None] | None]":
        """Have changes written in the order of the calls. The future ends when the log has them.

        Its result is the catalog's write of them.
        """
        # The future is made before the round: a round that fails at once ends it.
        if self._waiting_done is None:
            self._waiting_done = asyncio.get_running_loop().create_future()
            # A failure that no caller waits for any more is not an error of the loop.
            self._waiting_done.add_done_callback(lambda done: done.exception())
        done = self._waiting_done
        # A commit without changes waits for those before it, and for their sync.
        if entries:
            self._waiting.append(entries)
        self._is_waiting_durable |= is_durable
        # While a round is under way, this commit waits for the next one.
        if self._round is None:
            self._begin_round()
        return done

    @property
    def _logging(self) -> "asyncio.Future[Future[None] | None] | None":
        """The future that ends when the log has every change so far; None where it has them now."""
        return self._waiting_done or (self._round.done if self._round else None)

    def _begin_round(self) -> None:
        """Put the waiting commits into memory, and have a thread write the log."""
        assert self._waiting_done is not None  # noqa: S101  # somebody waits
        self._round = begun = _Round(self._waiting_done, self._is_waiting_durable)
        waiting, self._waiting, self._waiting_done = self._waiting, [], None
        self._is_waiting_durable = False
        try:
            for entries in waiting:
                # The commit is counted before the write: after a failure half way it is doubtful, not
                # forgotten.
                begun.commits.append((entries, self._counted(entries)))
                self._write(*begun.commits[-1])
        except Exception as error:  # noqa: BLE001  rocksdict raises nothing narrower
            # The commits that were not begun are refused as well.
            self._waiting = waiting[len(begun.commits) :] + self._waiting
            self._refuse(error)
            return
        if self._catalog and begun.commits:
            begun.noted = self._catalog.beside([(entries, last.sequence) for entries, last in begun.commits])
        # Only this thread writes the log, and the database's lock is held meanwhile: the loop must not write
        # beside it.
        begun.work = self._writer.submit(partial(self._carry_out, begun))
        loop = asyncio.get_running_loop()
        begun.work.add_done_callback(partial(_call_soon, loop, partial(self._end_round, begun)))
        self._start_watch(loop)

    def _carry_out(self, begun: _Round) -> None:
        # Only the writing thread writes the log and owns the witness, and syncs follow one another.
        self._write_log()
        if begun.is_durable:
            self.sync_log()
        # The catalog comes last: it must never have a commit that the log lacks, nor one behind its end mark.
        # A round that was given up has no callers that wait.
        if begun.noted and self._round is begun:
            begun.noted.write()

    def _write_log(self) -> None:
        # The interpreter is free meanwhile.
        self.database.flush_wal(sync=False)

    def _end_round(self, ended: _Round) -> None:
        """Tell the callers that the log is written, and begin the next round where commits wait."""
        # The round was given up as overdue: its callers have their answer, and its changes are owed.
        if self._round is not ended or ended.work is None:
            return
        if error := ended.work.exception():
            self._refuse(error)
            return
        self._round = None
        # The catalog gets the commits in order, and only now: it must never have a commit that the log lacks.
        if ended.commits:
            self._last = ended.commits[-1][1]
            if self._catalog and ended.noted:
                self._catalog.noted(ended.noted, self._last.sequence)
            elif self._catalog:
                self._catalog.append([(entries, last.sequence) for entries, last in ended.commits])
        ended.done.set_result(self._catalog.last_write if self._catalog and not ended.noted else None)
        if self._waiting_done:
            self._begin_round()

    def _refuse(self, error: BaseException) -> None:
        """Fail every commit that is not in the log, and owe its changes."""
        failed, self._round = self._round, None
        waiting, self._waiting = self._waiting, []
        self._note_failure(error)
        callers = [self._waiting_done]
        self._waiting_done, self._is_waiting_durable = None, False
        if failed:
            self._doubtful += failed.commits
            callers.append(failed.done)
            # The round's changes are older than those that waited. Noted last, an old value would win.
            waiting = [entries for entries, _ in failed.commits] + waiting
        for entries in waiting:
            self._owed.update(entries)
        for caller in callers:
            if caller is not None and not caller.done():
                failure = TierFailure(path=self._path, problem=self.problem)
                failure.__cause__ = error
                caller.set_exception(failure)

    def _start_watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start the watch for a device that hangs, unless it runs already."""
        if self._watch is None:
            self._watch = loop.call_later(self.patience_s, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give the device up where an operation is late; else watch on while one is under way."""
        self._watch = None
        # A device that was given up needs no watch: no new caller waits for it.
        if self._writer.is_owed or not self._writer.is_busy:
            return
        begun_ns = self._writer.oldest_ns
        # Between two operations none is under way, and the queued one needs the watch.
        if begun_ns is None or self._clock.monotonic_ns() - begun_ns < self.patience_s * 1e9:
            self._start_watch(loop)
            return
        # The commits are refused before the threads are given up: a caller with an answer finds the store
        # resting.
        self._refuse(_Overdue(f"the device has not answered for {self._hang_after_s:g} s"))
        self._give_up()

    def _give_up(self) -> None:
        for threads in self._threads:
            threads.give_up(lambda: TierFailure(path=self._path, problem=self.problem))

    async def reopen(self) -> bool:
        """See MetadataStore."""
        if not self._is_resting or time.monotonic() < self._next_look_s:
            return False
        # An operation that is still under way would answer for the old database.
        if self._writer.is_owed:
            return False
        # A resting store takes no commit: when the thread has answered, nothing uses the database.
        back = asyncio.wrap_future(self._writer.submit(_nothing))
        self._start_watch(asyncio.get_running_loop())
        await asyncio.shield(back)
        opened = await self._in_thread(self._open_again)
        self._next_look_s = time.monotonic() + REOPEN_PAUSE_S
        # A failure that does not pass has fenced the store meanwhile.
        if opened is None or not self._is_resting:
            return False
        last, seals = opened
        # An acknowledged commit is lost, and no change may follow.
        if not self._is_possible(last):
            self._is_resting = False
            self._failure = f"opened again it ends with {last}, and {self._last} was acknowledged"
            log.error("metadata_fenced path=%s problem=%s", self._path, self._failure)
            return False
        owed, self._owed = self._owed, {}
        # These commits had arrived after all: only the catalog lacks them, in their order.
        arrived = [(entries, c.sequence) for entries, c in self._doubtful if c.sequence <= last.sequence]
        if self._catalog:
            self._catalog.append(arrived)
        self._last = self._written = last
        self._seals, self._doubtful = seals, []
        self._failure, self._is_resting = None, False
        # One commit has all refused changes: its records are those of the cache at this moment. Its sync
        # covers commits that arrived before the rest and were never synced.
        await self._settle(self._put(list(owed.items()), is_durable=True))
        self.reopened_count += 1
        log.warning("metadata_reopened path=%s commit=%d owed=%d", self._path, last.sequence, len(owed))
        return True

    def _open_again(self) -> "tuple[Commit, Seals] | None":
        """The last commit of the database, opened anew, and each session's seal.

        None where it cannot be opened.
        """
        if not has_what_lacked(self._path):
            return None
        # RocksDB takes no writes after a failed one until it is opened anew.
        release(self.database)
        self._let_go()
        try:
            self._untouched = Untouched(self._path)
            self.database = self._untouched.database
            # The thread opens it, since it replays the log.
            value = self.database.get(records.COMMIT_KEY)
            last = records.decode_commit(value) if value else Commit(0, 0, 0)
            seals = Seals()
            for keys, values in self._batches(records.SESSION_PREFIX):
                records.verify(keys, values)
                seals.extend(keys, values)
            last_there = Commit(last.sequence, seals.read_count, seals.read_digest)
            # A database that is not reopened stays as it is.
            if self._is_possible(last_there):
                self._let_go()
                self.database = Rdict(self._path, options())
        except Exception as error:  # noqa: BLE001  rocksdict raises nothing narrower
            log.warning("metadata_reopen_failed path=%s error=%s", self._path, error)
            return None
        return last_there, seals

    def _is_possible(self, last: Commit) -> bool:
        """Whether the database may end with this commit: the last acknowledged one, or a doubtful one."""
        return last in {self._last, *(commit for _, commit in self._doubtful)}

    async def recorded_slots(self) -> set[Slot]:
        """See MetadataStore."""
        if logged := self._logging:
            # Commits on their way into the log may name slots too.
            await asyncio.wait([logged])
        return await self._in_thread(self._recorded_slots)

    async def _in_thread(self, work: Callable[[], Found]) -> Found:
        """Do work of seconds in the thread that no commit waits for, and return its result."""
        results: list[Found] = []
        done = self._beside.submit(lambda: results.append(work()))
        await asyncio.shield(asyncio.wrap_future(done))
        return results[0]

    def close(self) -> None:
        """Sync the log and close the files, also of a device that fails.

        Raises TierFailure where this sync fails. A database under a call that has not returned stays open
        until the process ends.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._watch:
            self._watch.cancel()
        try:
            self._finish_rounds()
            if self._failure is None and self._is_begun:
                # A fenced store is not synced: the next sync may report success for bytes that are lost.
                self._finish(self._writer.submit(self._sync_now)).result()
        finally:
            for threads in self._threads:
                # The threads of a hanging device end with the process.
                if not threads.is_owed:
                    self._finish(threads.submit(_nothing))
            is_owed = self._writer.is_owed
            for threads in self._threads:
                threads.close()
            if self._catalog:
                self._catalog.close(self._last.sequence)
            if self._witness:
                self._witness.close()
            # A database in the hands of a hanging device must not be closed: the call would hang as well.
            if not is_owed:
                release(self.database)
                self._let_go()
                del self.database

    def _finish_rounds(self) -> None:
        """Finish the rounds of callers that were cancelled."""
        while (ended := self._round) and ended.work:
            self._finish(ended.work)
            # The callers' loop may have been closed.
            with contextlib.suppress(RuntimeError):
                self._end_round(ended)

    def _finish(self, work: "Future[None]") -> "Future[None]":
        """Wait for a thread's work, and give it up where the device does not answer."""
        wait([work], min(END_PATIENCE_S, self._hang_after_s))
        if not work.done():
            self._refuse(_Overdue("the device does not answer at the end"))
            self._give_up()
        return work

    def _write(self, entries: Sequence[Entry], last: Commit) -> None:
        """Put a commit into memory. Raises what the database raises."""
        # One batch has the records and the commit's number: they come and go together.
        batch = WriteBatch(raw_mode=True)
        for key, value in entries:
            if value is None:
                batch.delete(key)
            else:
                batch.put(key, value)
        batch.put(records.COMMIT_KEY, records.encode_commit(last))
        self.database.write(batch)

    def _write_now(self, entries: Sequence[Entry]) -> None:
        """Put a commit into the log, before the store serves anybody. Raises TierFailure."""
        last = self._counted(entries)
        try:
            self._write(entries, last)
            self._write_log()
        except Exception as error:  # noqa: BLE001  rocksdict raises nothing narrower
            self._fail(error)
        self._last = last
        if self._catalog:
            self._catalog.append([(entries, last.sequence)])

    def _counted(self, entries: Sequence[Entry]) -> Commit:
        """Count the next commit: its number, and the sessions that it leaves."""
        assert self._seals is not None  # noqa: S101  # they were read before the database was opened
        _, count, digest = self._written
        for key, value in entries:
            if key.startswith(records.SESSION_PREFIX):
                # XOR takes a record out of the digest as it was put in, in any order.
                uid = key[len(records.SESSION_PREFIX) :]
                before, after = self._seals[uid], 0 if value is None else records.seal_of(value)
                digest ^= before ^ after
                count += bool(after) - bool(before)
                if after:
                    self._seals[uid] = after
                else:
                    self._seals.forget(uid)
        self._written = Commit(self._written.sequence + 1, count, digest)
        return self._written

    def sync_log(self) -> None:
        """Let every commit that is in memory outlive a power cut. For the thread that writes the log."""
        # The writing thread runs one sync at a time. A sync after a failed one may report success for lost
        # writes, so that it is not even tried.
        self._check()
        # No commit goes to memory while the log is written and synced.
        sequence = self._written.sequence
        try:
            self.database.flush_wal(sync=True)
        except Exception as error:
            # Noted here too: where the device was given up, nobody hears of this answer.
            if not self._is_passing(error):
                self._note_failure(error)
            raise
        # The witness comes after the sync: a witnessed number that is not on disk would refuse the next
        # start.
        if self._witness:
            self._witness.note(sequence)

    def _sync_now(self) -> None:
        """Sync beside the rounds. Raises TierFailure."""
        try:
            self.sync_log()
        except TierFailure:
            raise
        except Exception as error:  # noqa: BLE001  rocksdict raises nothing narrower
            self._fail(error)

    def _check(self) -> None:
        if self._failure is not None:
            raise TierFailure(path=self._path, problem=self.problem)

    def _fail(self, error: Exception) -> NoReturn:
        self._note_failure(error)
        raise TierFailure(path=self._path, problem=self.problem) from error

    def _is_passing(self, error: BaseException) -> bool:
        # The path is taken out of the text, because a directory may have any word in its name.
        return isinstance(error, _Overdue) or is_passing(str(error).replace(self._path, ""))

    def _note_failure(self, error: BaseException) -> None:
        is_passing = self._is_passing(error)
        # A failure that does not pass may come late, from a device that was given up.
        if self._failure is None or (self._is_resting and not is_passing):
            self._is_resting, self._failure = is_passing, str(error)
            log.error("metadata_refuses path=%s problem=%s", self._path, self.problem)


class _Overdue(Exception):
    """The device was given up."""


def _nothing() -> None:
    return


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None], _: object) -> None:
    """Call `call` on the loop, from a thread. Does nothing where the loop is closed: nobody waits then."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call)


def check_lock(path: Path) -> None:
    """Raise DataDirectoryUnusable where another process has the database, before RocksDB begins a new LOG."""
    try:
        with os.fdopen(open_private(path / "LOCK", os.O_RDWR), "rb+") as file:
            # The lock is of RocksDB's kind, and given up at once.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return
    except BlockingIOError as error:
        raise DataDirectoryUnusable(path=str(path), problem="another process holds the metadata") from error
    except OSError as error:
        problem = f"LOCK: {error.strerror}"
        raise DataDirectoryUnusable(path=str(path), problem=problem) from error


def _claim(path: str) -> None:
    try:
        # RocksDB's own files have the modes of the umask: the directory keeps others out.
        claim_directory(Path(path))
    except OSError as error:
        raise DataDirectoryUnusable(path=path, problem=error.strerror or str(error)) from error
