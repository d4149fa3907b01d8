"""Clock: the wall clock is set under a server and between two, and sessions live as long as they were to.

The server's own wall clock is moved by hours (`set_clock.c`, preloaded). A lease and a writer that are held
stay. A session of TTL seconds must be there shortly before and gone shortly after that many seconds. The
times that it answers with follow the wall clock. Seconds that only have to pass are put on both clocks, but
for the first time, where they pass. A machine that slept has slept for sessions too. Worst case: a session
that outlives its time by hours, or all of them gone at once.
"""

import argparse
import struct
import subprocess
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import ctxcache
from ctxcache.client import CallerModel, Client
from ctxcache.client.types import seconds
from ctxcache.errors import CacheError, SessionNotFound
from tests.cli.stored import HIDDEN, model_spec
from tests.faults.harness import Harness, Report, Unsupported
from tests.faults.lifecycle import STREAMS
from tests.faults.planted import MODULES, forked
from tests.faults.rows import rows_of
from tests.nursery import Nursery
from tests.server_process import ServerProcess

SOURCE = Path(__file__).with_name("set_clock.c")
HOURS_S = 2 * 3600
NS = 10**9
UPKEEP_WITHIN_S = 60.0
SLACK_S = 2.0
"""How far a time that is answered may be off: calls take their time."""


class SetClock:
    """The clocks of one process, and how far off they are."""

    def __init__(self, folder: Path) -> None:
        """Raises Unsupported: there is no C compiler."""
        library, self._path, self._wall_s = folder / "set_clock.so", folder / "offsets", 0.0
        try:
            subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, SOURCE], check=True)
        except FileNotFoundError as error:
            raise Unsupported("needs a C compiler: apt-get install gcc") from error
        self._path.write_bytes(bytes(16))
        self.passed_s = 0.0
        """Seconds that have passed for the process alone."""
        self.environment: Mapping[str, str] = {
            "LD_PRELOAD": str(library),
            "CLOCK_OFFSETS": str(self._path),
        }

    def set(self, *, wall_s: float = 0) -> None:
        """Let the wall clock be so far off what it would be, for all the time that has passed."""
        self._wall_s = wall_s
        with self._path.open("r+b") as file:
            file.write(struct.pack("<qq", int((wall_s + self.passed_s) * NS), int(self.passed_s * NS)))

    def let_pass(self, seconds: float) -> None:
        """Let so much time pass, by both clocks, at once."""
        self.passed_s += seconds
        self.set(wall_s=self._wall_s)

    def now_s(self) -> float:
        """The process's wall clock."""
        return time.time() + self._wall_s + self.passed_s


def run(options: argparse.Namespace, report: Report) -> None:
    """See the module."""
    program = forked([options.control] if options.control else [])
    with tempfile.TemporaryDirectory(prefix="ctxcache-clock-") as folder:
        clock = SetClock(Path(folder))
        with (
            Nursery(MODULES, clock.environment) as nursery,
            ServerProcess(
                Path(folder) / "data", environment=clock.environment, program=program, nursery=nursery
            ) as server,
        ):
            _deadlines_stay(report, server, clock)
            report.end_if_found()
            is_waited_for = not options.control
            for name, wall_s in (("back", -HOURS_S), ("forward", HOURS_S)):
                for is_restarted in (False, True):
                    case = f"{name}-{is_restarted}"
                    _lives_as_long(options, report, server, clock, case, wall_s, is_waited_for=is_waited_for)
                    report.end_if_found()
                    clock.set()
                    is_waited_for = False
            _sleeps(report, server, clock)


def _deadlines_stay(report: Report, server: ServerProcess, clock: SetClock) -> None:
    """Leases and reservations go by another clock: hours forward end none."""
    try:
        with ctxcache.connect(server.target) as client:
            client.models.register(model_spec())
            held = client.sessions.create(CallerModel(model_spec()), id="held", layout=[HIDDEN])
            held.append({stream: rows_of(0, stream, 0, 9, size) for stream, size in STREAMS.items()})
            with held.read(), held.writer(10):
                clock.set(wall_s=HOURS_S)
                _let_upkeep_turn(report, client, clock)
                found = client.admin.stats()
                if (found.lease_count, found.reservation_count) != (1, 1):
                    report.find(
                        f"the clock was set, and of a lease and a writer {found.lease_count} and "
                        f"{found.reservation_count} are left"
                    )
    except CacheError as error:
        report.find(f"a reader and a writer across a set clock: {error.reason}: {error}")
    clock.set()


def _let_upkeep_turn(report: Report, client: Client, clock: SetClock) -> None:
    """Wait until upkeep has removed a session whose time is over: deadlines it has looked at before."""
    count = client.admin.stats().session_count
    client.sessions.create(CallerModel(model_spec()), id="mark", layout=[HIDDEN], ttl=seconds(60))
    clock.let_pass(61)
    end_s = time.monotonic() + UPKEEP_WITHIN_S
    while client.admin.stats().session_count > count:
        if time.monotonic() > end_s:
            report.find("upkeep does not turn after the clock was set")
            return
        time.sleep(0.01)


def _lives_as_long(
    options: argparse.Namespace,
    report: Report,
    server: ServerProcess,
    clock: SetClock,
    name: str,
    wall_s: float,
    *,
    is_waited_for: bool,
) -> None:
    with ctxcache.connect(server.target) as client:
        client.models.register(model_spec())
        began_s = time.monotonic()
        client.sessions.create(
            CallerModel(model_spec()), id=name, layout=[HIDDEN], ttl=seconds(options.ttl_s)
        )
        client.sessions.create(
            CallerModel(model_spec()), id=f"{name}-hour", layout=[HIDDEN], ttl=seconds(3600)
        )
        at = datetime.fromtimestamp(clock.now_s() + options.ttl_s, UTC)
        client.sessions.create(CallerModel(model_spec()), id=f"{name}-at", layout=[HIDDEN], expire_time=at)
    made_s = time.monotonic()
    clock.set(wall_s=wall_s)
    if name.endswith("True"):
        server.kill9()
        server.start()
    with ctxcache.connect(server.target) as client:
        stays = client.sessions.get(f"sessions/{name}-hour")
        told_s = (stays.expire_time_ns or 0) / NS - clock.now_s()
        if not -SLACK_S < 3600 - told_s < time.monotonic() - began_s + SLACK_S:
            report.find(f"{name}: an hour's session says that it has {told_s:.0f} s by the wall clock")
        _given_afterwards(report, client, clock, name)
        listed = {session.name for session in client.sessions.list()}
        if (
            time.monotonic() - began_s < options.ttl_s
            and not {f"sessions/{name}", f"sessions/{name}-at"} <= listed
        ):
            report.find(f"{name}: a session of {options.ttl_s} s is gone before its time")
        left_s = max(0.0, made_s + options.ttl_s + 1 - time.monotonic())
        (time.sleep if is_waited_for else clock.let_pass)(left_s)
        for ended in (name, f"{name}-at"):
            try:
                client.sessions.get(f"sessions/{ended}")
            except SessionNotFound:
                continue
            report.find(f"{ended}: a session of {options.ttl_s} s outlives its time")


def _given_afterwards(report: Report, client: Client, clock: SetClock, name: str) -> None:
    """A time that a caller gives is the wall clock's as it is then."""
    began_s, at = time.monotonic(), datetime.fromtimestamp(clock.now_s() + 600, UTC)
    made = client.sessions.create(
        CallerModel(model_spec()), id=f"{name}-late", layout=[HIDDEN], expire_time=at
    ).info
    left_s = ((made.expire_time_ns or 0) - (made.create_time_ns or 0)) / NS
    if not -SLACK_S < 600 - left_s < time.monotonic() - began_s + SLACK_S:
        report.find(f"{name}: a session that was to have 600 s has {left_s:.0f} s")


def _sleeps(report: Report, server: ServerProcess, clock: SetClock) -> None:
    """Two hours pass for the machine in no time."""
    with ctxcache.connect(server.target) as client:
        client.sessions.create(CallerModel(model_spec()), id="sleeper", layout=[HIDDEN], ttl=seconds(3600))
        clock.let_pass(HOURS_S)
        try:
            client.sessions.get("sessions/sleeper")
            report.find("a session of an hour is there after the machine has slept for two")
        except SessionNotFound:
            report.figures["sleep_s"] = HOURS_S


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ttl-s", type=float, default=8.0, help="how long sessions live")


HARNESS = Harness(
    "clock",
    "Sets the wall clock of a server, forwards and back, and looks how long sessions live.",
    run,
    {
        "wall_clock": "sessions live by the wall clock",
        "deadlines_by_wall_clock": "leases and reservations end by the wall clock",
        "forgets_time": "each start begins with the wall clock's time",
    },
    _options,
)

if __name__ == "__main__":
    raise SystemExit(HARNESS.main())
