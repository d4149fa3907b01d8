"""A worker whose restores wait before they read their second layer, until a file is there.

The file's path is the first argument; `PATH held` is there once a restore waits.
"""

import os
import sys
import threading
from typing import Any

from gpu_worker.cli.app import app
from gpu_worker.pipeline.sources import LeasedSource

POLL_S = 0.005


def run() -> None:
    """Hold restores up, and be the worker that the other arguments ask for."""
    path = sys.argv.pop(1)
    fill = LeasedSource.fill

    def held(source: LeasedSource, stream: Any, begin: int, end: int, into: Any) -> None:
        while stream.layer == 1 and not os.path.exists(path):  # noqa: PTH110  asked a thousand times
            open(path + " held", "w").close()  # noqa: PTH123
            threading.Event().wait(POLL_S)
        fill(source, stream, begin, end, into)

    LeasedSource.fill = held  # type: ignore[assignment, method-assign]  # that is the fault
    app()
