"""Devices: one of two SSD directories goes, at a start and at run time, and comes back.

Sessions are durable on both. When one is gone, look-ups, lists and tokens counted must be true before
anything is read; what is claimed is read and compared; sessions on the other device are whole. When it is
back, all of them are. At last each hangs, over FUSE: it answers nothing, and says no error either; the first
one has the catalog besides. So does the device of the records, beside which reads go on. With two copies
(--copies 2) no token may be missing, whichever device is gone or hangs. Worst case: every session lies on
both devices, and most of the tokens are lost.
"""

import argparse
import errno
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import ctxcache
from ctxcache.client import CallerModel, Client
from ctxcache.client.types import Durability, InjectedFaultKind, MissEvent, PathState, seconds
from ctxcache.errors import CacheError
from ctxcache.format.streams import TOKENS
from tests.cli.stored import HIDDEN, ROW_BYTES, model_spec
from tests.faults.hanging_disk import HangingDisk, hanging_disk, why_not
from tests.faults.harness import Harness, Report, Unsupported
from tests.faults.planted import forked
from tests.faults.rows import first_difference, rows_of
from tests.server_process import ServerDidNotStart, ServerProcess

MODEL = CallerModel(model_spec())
STREAMS = {TOKENS: 4, HIDDEN: ROW_BYTES}
TOKENS_PER_APPEND = 96
WITHIN_S, UPKEEP_S = 20.0, 1.2
HANG_AFTER_S = 2
HANGS = {"waits_for_what_hangs": 1, "waits_for_the_catalog": 0}
"""The device whose hanging shows each of these controls."""
RECORDS_HANG = "waits_for_the_log"
"""The control that the hanging device of the records shows."""
LEAST_SHARE = 0.4
"""The share of all tokens that one of two devices must have: sessions are spread evenly, but for one."""
REFUSED_EXIT = 9


class Places:
    """Two SSD directories, and where one of them is put when it is gone."""

    def __init__(self, folder: Path, copies: int) -> None:
        self.folder = folder
        self.paths = [folder / "ssd0", folder / "ssd1"]
        self.options = [part for path in self.paths for part in ("--ssd-directories", str(path))]
        self.options += ["--ssd-copies", str(copies)]

    def take(self, index: int, *, is_left_empty: bool) -> None:
        """Take one away, as if it were not mounted: its place may be there, empty."""
        self.paths[index].rename(self.folder / "away")
        if is_left_empty:
            self.paths[index].mkdir()

    def put_back(self, index: int) -> None:
        """Put it where it was."""
        with suppress(FileNotFoundError):
            self.paths[index].rmdir()
        (self.folder / "away").rename(self.paths[index])


def run(options: argparse.Namespace, report: Report) -> None:
    """See the module."""
    program = forked([options.control] if options.control else [])
    if options.control == "makes_one_copy":
        options.copies = 2
    with tempfile.TemporaryDirectory(prefix="ctxcache-devices-") as folder:
        places = Places(Path(folder), options.copies)
        if (hangs := HANGS.get(options.control)) is not None:
            _hangs(options, report, places.folder, hangs)
            return
        if options.control == RECORDS_HANG:
            _records_hang(options, report, places.folder)
            return
        server = ServerProcess(
            Path(folder) / "data",
            *places.options,
            "--ssd-missing",
            "serve",
            "--fault-injection",
            "true",
            program=program,
        )
        try:
            _scenario(options, report, server, places)
        finally:
            server.close()


def _scenario(options: argparse.Namespace, report: Report, server: ServerProcess, places: Places) -> None:
    sizes = {f"sessions/s{i}": 100 + 61 * i % 500 for i in range(options.sessions)}
    with server, ctxcache.connect(server.target) as client:
        _fill(client, sizes)
    server.kill9()
    places.take(1, is_left_empty=True)
    _refuses_by_default(report, server, places)
    server.start()
    with ctxcache.connect(server.target) as client:
        _judge(report, "start", client, sizes, options.copies)
        if list(places.paths[1].iterdir()):
            report.find("the place of a directory that is not mounted was written to")
    report.end_if_found()
    # The records that upkeep owes have been written meanwhile.
    time.sleep(UPKEEP_S)
    server.kill9()
    places.put_back(1)
    server.start()
    _is_whole(report, "start", server, sizes)
    report.end_if_found()
    _at_run_time(report, server, sizes, options.copies)
    report.end_if_found()
    _displaced(report, server, places, sizes)
    report.end_if_found()
    for index in (1, 0):
        _hangs(options, report, places.folder, index)
        report.end_if_found()
    _records_hang(options, report, places.folder)


def _fill(client: Client, sizes: Mapping[str, int]) -> None:
    """Turn by turn, so that sessions are written beside each other; each append is durable."""
    client.models.register(model_spec())
    for name in sizes:
        client.sessions.create(MODEL, id=name.removeprefix("sessions/"), layout=[HIDDEN])
    done = dict.fromkeys(sizes, 0)
    while any(done[name] < size for name, size in sizes.items()):
        for i, (name, size) in enumerate(sizes.items()):
            begin, end = done[name], min(done[name] + TOKENS_PER_APPEND, size)
            if begin < end:
                rows = {s: rows_of(i, s, begin, end, row_bytes) for s, row_bytes in STREAMS.items()}
                client.sessions.open(name, MODEL).append(rows, durability=Durability.DISK)
                done[name] = end
    for name in sizes:
        client.admin.demote_session(name)


def _refuses_by_default(report: Report, server: ServerProcess, places: Places) -> None:
    strict = ServerProcess(server.data_directory, *places.options)
    try:
        strict.start()
        report.find("a start without a directory was not refused, though nobody had said that it may be")
    except ServerDidNotStart as refused:
        if refused.returncode != REFUSED_EXIT:
            report.find(f"a start without a directory ended with {refused.returncode}")
    finally:
        strict.close()


def _judge(report: Report, when: str, client: Client, sizes: Mapping[str, int], copies: int) -> None:
    """Tokens that look-ups claim must be there, right, and about half of all; with two copies all."""
    fingerprint = model_spec().fingerprint()
    found = client.sessions.lookup((name, fingerprint) for name in sizes)
    claimed = {result.name: result.token_count for result in found if not result.reason}
    reasons = {result.reason for result in found if result.reason}
    listed = {session.name: session.token_count for session in client.sessions.list()}
    got = {name: client.sessions.get(name).token_count for name in sizes}
    if listed != got or {name: count for name, count in got.items() if count} != claimed:
        report.find(f"{when}: look-ups, lists and GetSession do not say the same")
    if reasons - {"DEVICE_LOST"}:
        report.find(f"{when}: look-ups give {sorted(reasons)} as reasons")
    served = sum(_read(report, when, client, name, i, got[name]) for i, name in enumerate(sizes))
    total = sum(sizes.values())
    whole = sum(got[name] == size for name, size in sizes.items())
    for name, size in sizes.items():
        if got[name] < size:
            _is_explained(report, when, client, name, size - got[name])
    share = served / total
    report.figures[f"{when}_served_share"] = round(share, 3)
    report.figures[f"{when}_claimed_share"] = round(sum(got.values()) / total, 3)
    report.figures[f"{when}_whole_sessions"] = f"{whole} of {len(sizes)}"
    if share < (LEAST_SHARE if copies == 1 else 1):
        report.find(
            f"{when}: {share:.0%} of all tokens are left, with one of two devices gone, copies: {copies}"
        )


def _read(report: Report, when: str, client: Client, name: str, owner: int, count: int) -> int:
    """Tokens that a read gives, all of them right."""
    if not count:
        return 0
    try:
        with client.sessions.open(name, MODEL).read() as rows:
            for stream in STREAMS:
                if first_difference(rows.array(stream), owner, stream, 0) is not None:
                    report.find(f"{when}: {name} has wrong bytes")
            return int(rows.array(TOKENS).shape[0])
    except CacheError as error:
        report.find(f"{when}: {name} claims {count} tokens, and a read of them fails: {error}")
        return 0


def _is_explained(report: Report, when: str, client: Client, name: str, missing_count: int) -> None:
    answer = client.admin.why_miss(name)
    if answer.reason != MissEvent.DEVICE_LOST or answer.withheld_token_count != missing_count:
        report.find(f"{when}: why-miss does not explain {missing_count} tokens of {name}")


def _is_whole(report: Report, when: str, server: ServerProcess, sizes: Mapping[str, int]) -> None:
    with ctxcache.connect(server.target) as client:
        for i, (name, size) in enumerate(sizes.items()):
            count = client.sessions.get(name).token_count
            if count != size or _read(report, when, client, name, i, count) != size:
                report.find(f"{when}: the device is back, and {name} has {count} of {size} tokens")


def _at_run_time(report: Report, server: ServerProcess, sizes: Mapping[str, int], copies: int) -> None:
    """The device under one path answers every read with an error, and then none."""
    with ctxcache.connect(server.target) as client:
        path = next(tier.path for tier in client.admin.stats().tiers if "ssd1" in tier.path)
        for name in sizes:
            client.admin.demote_session(name)
        client.admin.inject_fault(
            InjectedFaultKind.SSD_READ_ERROR,
            path=path,
            count=10_000,
            duration=seconds(3600),
            error_number=errno.EIO,
        )
        for name in sizes:
            # The call that finds the loss is refused.
            with suppress(CacheError), client.sessions.open(name, MODEL).read() as rows:
                rows.array(TOKENS)
        if not _until(report, lambda: _state(client, path) == PathState.LOST):
            report.find("run time: a device of which nothing can be read is not lost")
        _judge(report, "run_time", client, sizes, copies)
        report.end_if_found()
        client.admin.clear_faults()
        if not _until(report, lambda: _state(client, path) != PathState.LOST):
            report.find("run time: a device that answers again is still lost")
    _is_whole(report, "run time", server, sizes)


def _displaced(report: Report, server: ServerProcess, places: Places, sizes: Mapping[str, int]) -> None:
    """A directory is moved away under the server: what is acknowledged from then on must not lie in it."""
    server.terminate()
    server.start()
    places.take(1, is_left_empty=False)
    with ctxcache.connect(server.target) as client:
        path = next(tier.path for tier in client.admin.stats().tiers if "ssd1" in tier.path)
        if not _until(report, lambda: _state(client, path) == PathState.RESTING):
            report.find("a path whose directory is gone goes on taking writes")
        report.end_if_found()
        late = {f"sessions/late{i}": 200 for i in range(4)}
        _fill(client, late)
    server.kill9()
    server.start()
    with ctxcache.connect(server.target) as client:
        for i, (name, size) in enumerate(late.items()):
            if _read(report, "displaced", client, name, i, client.sessions.get(name).token_count) != size:
                report.find(f"{name} was acknowledged on a path whose directory was gone")
        places.put_back(1)
        if not _until(report, lambda: _state(client, path) == PathState.OPEN):
            report.find("a directory that was mounted again under the server is not taken")
    _is_whole(report, "mounted again", server, sizes)


def _hangs(options: argparse.Namespace, report: Report, folder: Path, index: int) -> None:
    """The device under one directory answers nothing any more.

    Neither reads nor commits nor the end wait for it.
    """
    when = f"hang{index}"
    if problem := why_not():
        if options.control:
            raise Unsupported(problem)
        report.figures[when] = f"not tested: {problem}"
        return
    program = forked([options.control] if options.control else [])
    directories = [folder / f"{when}_ssd{i}" for i in range(2)]
    mount_point = directories[index]
    with hanging_disk(mount_point, folder / f"{when}_behind") as disk:
        server = ServerProcess(
            folder / f"{when}_data",
            *(part for path in directories for part in ("--ssd-directories", str(path))),
            "--ssd-copies",
            str(options.copies),
            "--ssd-hang-after-s",
            str(HANG_AFTER_S),
            "--drain-timeout-s",
            "5",
            "--flush-timeout-s",
            "5",
            program=program,
        )
        try:
            sizes = {f"sessions/h{i}": 100 + 61 * i % 500 for i in range(options.sessions)}
            with server, ctxcache.connect(server.target) as client:
                _fill(client, sizes)
                path = next(tier.path for tier in client.admin.stats().tiers if str(mount_point) in tier.path)
                _is_noticed(report, when, client, server, disk, path, sizes, options.copies)
                report.end_if_found()
                server.signal(signal.SIGTERM)
                if not _until(report, lambda: _main_thread_is_gone(server.pid)):
                    report.find(f"{when}: a server does not end while its device hangs")
                disk.tell("answer")
                server.wait(WITHIN_S)
            server.start()
            _is_whole(report, when, server, sizes)
        finally:
            # A process in the hands of a device that hangs cannot be killed either.
            disk.tell("answer")
            server.close()


def _is_noticed(
    report: Report,
    when: str,
    client: Client,
    server: ServerProcess,
    disk: HangingDisk,
    path: str,
    sizes: Mapping[str, int],
    copies: int,
) -> None:
    with ThreadPoolExecutor(len(sizes)) as callers:
        threads_before = _thread_count(server.pid)
        disk.tell("hang")
        reads = [callers.submit(_read_or_refused, client, name) for name in sizes]
        try:
            if not _until(report, lambda: all(read.done() for read in reads)):
                report.find(f"{when}: reads of a device that answers nothing are not answered either")
            elif not _until(report, lambda: _state(client, path) == PathState.LOST):
                report.find(f"{when}: a device that answers nothing is not lost")
            report.end_if_found()
            _judge(report, when, client, sizes, copies)
            report.end_if_found()
            report.figures[f"{when}_more_threads"] = _thread_count(server.pid) - threads_before
            late = {f"sessions/hlate{i}": 200 for i in range(4)}
            filling = callers.submit(_fill, client, late)
            if not _until(report, filling.done):
                report.find(f"{when}: commits wait for a device that answers nothing")
            report.end_if_found()
            filling.result()
            for i, (name, size) in enumerate(late.items()):
                if _read(report, when, client, name, i, client.sessions.get(name).token_count) != size:
                    report.find(
                        f"{when}: {name} was acknowledged beside a device that hangs, and is not there"
                    )
            report.end_if_found()
        except BaseException:
            disk.tell("answer")
            raise


def _records_hang(options: argparse.Namespace, report: Report, folder: Path) -> None:
    """The device of the data directory answers nothing any more, and then everything."""
    if problem := why_not():
        if options.control:
            raise Unsupported(problem)
        report.figures["records_hang"] = f"not tested: {problem}"
        return
    data = folder / "records_data"
    server = ServerProcess(
        data,
        "--ssd-directories",
        str(folder / "records_ssd"),
        "--ssd-hang-after-s",
        str(HANG_AFTER_S),
        program=forked([options.control] if options.control else []),
    )
    server.start()
    server.terminate()
    made, behind = folder / "records_made", folder / "records_behind"
    (data / "metadata").rename(made)
    with hanging_disk(data / "metadata", behind) as disk:
        shutil.copytree(made, behind, dirs_exist_ok=True)
        try:
            sizes = {f"sessions/h{i}": 100 + 61 * i % 500 for i in range(options.sessions)}
            with server, ctxcache.connect(server.target) as client:
                _fill(client, sizes)
                _goes_on_without_records(report, client, disk, sizes)
                report.end_if_found()
                after = {"sessions/after": 300}
                _fill(client, after)
                server.kill9()
            server.start()
            _is_whole(report, "records hang", server, sizes)
            with ctxcache.connect(server.target) as client:
                if client.sessions.get("sessions/after").token_count != after["sessions/after"]:
                    report.find("records hang: what was acknowledged after the device came back is gone")
        finally:
            disk.tell("answer")
            server.close()


def _goes_on_without_records(
    report: Report, client: Client, disk: HangingDisk, sizes: Mapping[str, int]
) -> None:
    client.sessions.create(MODEL, id="beside", layout=[HIDDEN])
    rows = {s: rows_of(0, s, 0, TOKENS_PER_APPEND, row_bytes) for s, row_bytes in STREAMS.items()}
    refused: list[CacheError] = []

    def append() -> None:
        try:
            client.sessions.open("sessions/beside", MODEL).append(rows, durability=Durability.DISK)
        except CacheError as error:
            refused.append(error)

    with ThreadPoolExecutor(len(sizes) + 1) as callers:
        disk.tell("hang")
        try:
            appending = callers.submit(append)
            reads = [
                callers.submit(_read, report, "records hang", client, name, i, size)
                for i, (name, size) in enumerate(sizes.items())
            ]
            if not _until(report, lambda: all(read.done() for read in reads)):
                report.find("reads wait for the device of the records, which answers nothing")
            elif [read.result() for read in reads] != list(sizes.values()):
                report.find("reads beside a device of the records that answers nothing are not whole")
            elif not _until(report, appending.done):
                report.find("a durable append waits without end for a device that answers nothing")
            elif not refused or refused[0].reason != "TIER_FAILURE":
                report.find(f"a durable append that no device has recorded ended with {refused}")
            report.end_if_found()
            append()
            if len(refused) < 2:
                report.find("a durable append was acknowledged though nothing can be recorded")
        finally:
            disk.tell("answer")
    if not _until(report, lambda: _is_created(client, "probe")):
        report.find("the device of the records answers again, and no change is taken")


def _is_created(client: Client, name: str) -> bool:
    with suppress(CacheError):
        client.sessions.create(MODEL, id=name, layout=[HIDDEN])
        return True
    return False


def _read_or_refused(client: Client, name: str) -> None:
    with suppress(CacheError), client.sessions.open(name, MODEL).read() as rows:
        rows.array(TOKENS)


def _thread_count(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def _main_thread_is_gone(pid: int) -> bool:
    """Whether the process has ended, but for threads that the kernel keeps for a device."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def _state(client: Client, path: str) -> PathState:
    return next(tier.state for tier in client.admin.stats().tiers if tier.path == path)


def _until(report: Report, is_so: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + report.patience_s(WITHIN_S)
    while not is_so():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sessions", type=int, default=40, help="durable on both devices; long run 400")
    parser.add_argument("--copies", type=int, choices=(1, 2), default=1, help="of each segment (default 1)")


HARNESS = Harness(
    "devices",
    "Takes one of two SSD directories away, at a start and at run time, and brings it back.",
    run,
    {
        "paths_in_turn": "segments of a session go round the paths",
        "claims_what_is_lost": "sessions show what lies on a lost path",
        "cut_for_good": "records of sessions are cut when a path is lost",
        "takes_any_directory": "a path is used though its directory is gone",
        "makes_one_copy": "sessions that shall have two copies have one (--copies 2)",
        "waits_for_what_hangs": "operations that a device does not return are waited for",
        "waits_for_the_catalog": "the event loop waits for each write of the catalog",
        RECORDS_HANG: "the event loop waits for each write of the records' log",
    },
    _options,
)

if __name__ == "__main__":
    raise SystemExit(HARNESS.main())
