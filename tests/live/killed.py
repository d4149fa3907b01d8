"""A server process that is killed at chosen moments of an engine's turns, and started again."""

from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.live.compare import Setting
from tests.live.engine import SLOT_BYTES
from tests.live.running import BUFFER_SHARE
from tests.server_process import ServerProcess


class KilledServer:
    """Killed where the count of moments is in `at`: a turn begins, ends, has written its rows, is over."""

    def __init__(self, directory: Path, setting: Setting, at: Collection[int]) -> None:
        sizes = setting.sizes
        self._server = ServerProcess(
            directory,
            "--arena-size-bytes", str((sizes.dram_segments + 1) * SLOT_BYTES),
            "--ssd-size-bytes", str(sizes.ssd_segments * SLOT_BYTES), "--client-share", "1",
            "--lease-share", "1", "--reservation-share", "1", "--placement-policy", setting.policy,
            "--dram-low-watermark", str(BUFFER_SHARE), "--dram-high-watermark", str(BUFFER_SHARE),
        )  # fmt: skip
        self._at = at
        self._moment = self.kill_count = 0

    @property
    def target(self) -> str:
        """Its address, always the same."""
        return self._server.target

    def set_time(self, now_s: float) -> None:  # noqa: ARG002  the clock is the machine's
        """A turn begins or ends."""
        self._pass()

    def written(self) -> None:
        """Rows are in place and not committed."""
        self._pass()

    def rest(self) -> None:
        """A turn is over."""
        self._pass()

    def prefetch(self) -> None:
        """It does that when it wants."""

    def _pass(self) -> None:
        self._moment += 1
        if self._moment in self._at:
            self._server.kill9()
            self._server.start()
            self.kill_count += 1

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.close()
