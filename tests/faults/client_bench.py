"""The bench on which clients misbehave.

A server, sessions of known content, and processes to be killed or frozen.
"""

import argparse
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import numpy as np

import ctxcache
from ctxcache.client import CallerModel, Client
from ctxcache.format.streams import TOKENS, DType, StateKind, Stream, StreamSpec
from tests.faults.harness import Report
from tests.faults.rows import first_difference, rows_of
from tests.model_specs import small_model
from tests.server_process import ServerProcess

KV = Stream(0, StateKind.KV)
ROW_BYTES = 1 << 16
TOKENS_EACH = 512
SESSIONS = 6
TIMEOUT_S = 20.0
"""The longest time of a call on a busy machine; nothing is promised about it."""
START_WITHIN_S = 300.0
"""The longest time that a client may take to open a thousand streams."""
KEEPALIVE_S = 4
"""A peer has half of it to answer a ping. One second was too little for a live client on a busy machine."""
GONE_WITHIN_S = 1.5 * KEEPALIVE_S
"""A peer that says nothing is given up by then.

Of one that ended or cancelled the kernel or gRPC tells sooner.
"""
SILENT_GONE_WITHIN_S = 2 * GONE_WITHIN_S
"""The same where it is gRPC's own timers that run out: they may be late on a busy machine."""
MODEL = small_model(
    StreamSpec(KV, ROW_BYTES, DType.FLOAT16),
    model_id="clients",
    architecture="Clients",
    hidden_size=8,
    head_size=4,
)
OWN = CallerModel(MODEL)


@dataclass(frozen=True, slots=True)
class Bench:
    """The server under test, an honest client, and where findings go."""

    server: ServerProcess
    client: Client
    report: Report
    options: argparse.Namespace

    @property
    def names(self) -> list[str]:
        """The sessions there are, each with its content."""
        return [f"sessions/s{owner}" for owner in range(SESSIONS)]

    def store(self, session_id: str, owner: int) -> str:
        """Create a session with the owner's rows, on SSD too; its name."""
        name = f"sessions/{session_id}"
        self.client.sessions.create(OWN, id=session_id, layout=[KV])
        self.client.sessions.open(name, OWN).append(
            {s: rows_of(owner, s, 0, TOKENS_EACH, n) for s, n in ((KV, ROW_BYTES), (TOKENS, 4))}
        )
        self.client.sessions.open(name).flush()
        return name

    def wait_until(self, what: str, is_so: Callable[[], bool], within_s: float) -> float:
        """Seconds until it is so; a finding when that is too long."""
        began_s = time.monotonic()
        while not is_so():
            if time.monotonic() - began_s > within_s:
                held = self.client.admin.stats()
                self.report.find(
                    f"{what} is not so after {within_s:g} s, with {held.lease_count} leases"
                    f" and {held.reservation_count} reservations"
                )
                self.report.end_if_found()
                break
            time.sleep(0.05)
        return round(time.monotonic() - began_s, 2)

    def holds_nothing(self) -> bool:
        """Whether no lease and no reservation is left."""
        stats = self.client.admin.stats()
        return not stats.lease_count and not stats.reservation_count

    def holds_all(self) -> bool:
        """Whether there is a lease or a reservation for each session."""
        stats = self.client.admin.stats()
        return stats.lease_count + stats.reservation_count == SESSIONS

    def check_rows(self, owner: int, access: str) -> None:
        """Read a session, locally or by stream: all that was written, and nothing else."""
        with (
            ctxcache.connect(
                self.server.target, timeout_s=TIMEOUT_S, access="local" if access == "local" else "remote"
            ) as client,
            client.sessions.open(f"sessions/s{owner}", OWN).read() as rows,
        ):
            found = np.concatenate([np.asarray(piece) for piece in rows.pieces(KV)])
            if len(found) != TOKENS_EACH or first_difference(found, owner, KV, 0) is not None:
                self.report.find(
                    f"s{owner} ({access}): {len(found)} tokens, or other bytes than were written"
                )
        self.report.count("sessions_checked")


class Child:
    """A client process that says a word per line."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def word(self, within_s: float = TIMEOUT_S) -> str:
        """Its next line; empty when it says none in time."""
        if self._process.stdout is None:
            raise RuntimeError("standard output is a pipe, always")
        can_read, _, _ = select.select([self._process.stdout], [], [], within_s)
        return self._process.stdout.readline().rstrip("\n") if can_read else ""

    def freeze(self) -> None:
        """Stop it where it stands."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill it, and wait until it is gone."""
        self._process.kill()
        self._process.wait()


@contextmanager
def child(module: str, first_word: str, *arguments: str) -> Iterator[Child]:
    """Run a client until it has said its first word; it is killed at the end. Raises RuntimeError."""
    command = [sys.executable, "-m", f"tests.faults.{module}", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        it = Child(process)
        try:
            if it.word(START_WITHIN_S) != first_word:
                raise RuntimeError(f"{module} {arguments} did not start")
            yield it
        finally:
            it.kill()


def holding(bench: Bench, kind: str, names: Sequence[str]) -> AbstractContextManager[Child]:
    """A client that holds one of `kind` for each session, and does nothing."""
    return child("holder", "held", bench.server.target, kind, *names)
