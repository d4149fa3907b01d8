"""A TCP proxy that can stop forwarding without closing anything: what a cut cable looks like to both ends."""

import select
import socket
import threading
from types import TracebackType
from typing import Self

PIECE_BYTES = 1 << 16


class Blackhole:
    """Forwards to `target` until `cut`; from then on it swallows nothing and answers nothing."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._to = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._is_cut = threading.Event()
        self._is_closed = threading.Event()
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def target(self) -> str:
        """Where to connect."""
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def cut(self) -> None:
        """Stop forwarding."""
        self._is_cut.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Break every connection, and take none any more."""
        self._is_closed.set()
        for sock in (self._listener, *self._sockets):
            sock.close()

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._to)
            except OSError:
                return
            self._sockets += [near, far]
            threading.Thread(target=self._forward, args=(near, far), daemon=True).start()

    def _forward(self, near: socket.socket, far: socket.socket) -> None:
        other = {near: far, far: near}
        while not self._is_cut.is_set() and not self._is_closed.is_set():
            try:
                for ready in select.select([near, far], [], [], 0.05)[0]:
                    data = ready.recv(PIECE_BYTES)
                    if not data:
                        near.close()
                        far.close()
                        return
                    other[ready].sendall(data)
            except (OSError, ValueError):
                return
