"""The drain harness finds nothing in the product."""

from pathlib import Path

import ctxcache
from ctxcache.cli.failures import ExitCode
from ctxcache.client import CallerModel
from tests.faults.drain import HARNESS
from tests.faults.planted import command
from tests.faults.rows import rows_of
from tests.faults.sizes import sized
from tests.faults.soak import STORED, model
from tests.server_process import ServerProcess


@sized(short=["--cycles", "2"], long=["--cycles", "20"])
def test_nothing_begun_or_acknowledged_is_lost_by_a_drain(size: list[str]) -> None:
    """Drains under load."""
    report = HARNESS.execute(size)

    assert report.findings == []


def test_a_device_that_hangs_does_not_hold_the_end(tmp_path: Path) -> None:
    """The process ends within what settings allow, says so, and leaves nothing that a start minds."""
    options = ("--drain-timeout-s", "1", "--flush-timeout-s", "1")
    rows = {s.stream: rows_of(1, s.stream, 0, 10, s.row_bytes) for s in STORED}
    with ServerProcess(tmp_path / "data", *options, program=command(["device_hangs"])) as hanging:
        with ctxcache.connect(hanging.target, access="remote") as client:
            client.models.register(model(0))
            client.sessions.create(CallerModel(model(0)), id="a", layout=[s.stream for s in STORED[1:]])
            client.sessions.open("sessions/a", CallerModel(model(0))).append(rows)
        code = hanging.terminate()
        arena = Path(hanging.ready["arena"]["path"])
        is_arena_left = arena.exists()
    with (
        ServerProcess(tmp_path / "data", *options) as again,
        ctxcache.connect(again.target, access="remote") as client,
    ):
        token_count = client.sessions.get("sessions/a").token_count

    assert code == ExitCode.DEVICE
    assert "longer than 1 + 1 s; what was not on disk by then is lost (TIER_FAILURE)" in hanging.stderr
    assert (is_arena_left, token_count) == (False, 0)
