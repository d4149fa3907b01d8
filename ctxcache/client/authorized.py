"""A channel whose every call says by a token who calls.

The token's file is looked at before each call, and read again when it was changed: whoever exchanges tokens
need not restart
clients. Worst case: the file is gone or empty, which raises InvalidConfiguration where the call is made.
"""

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

import grpc

from ctxcache.errors import InvalidConfiguration
from ctxcache.runtime.files import check_secret


class OwnTokenFile:
    """The token in a file. Thread-safe."""

    def __init__(self, path: str | Path) -> None:
        """Raises InvalidConfiguration."""
        self._path = Path(path)
        self._lock = threading.Lock()
        self._stamp: tuple[int, ...] = ()
        self._metadata: tuple[tuple[str, str], ...] = ()
        self.read()

    def read(self) -> str:
        """The token as it is now. Raises InvalidConfiguration."""
        return self.metadata()[0][1].removeprefix("Bearer ")

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a call says. Raises InvalidConfiguration."""
        try:
            status = self._path.stat()
            stamp = (status.st_mtime_ns, status.st_ino, status.st_size)
            with self._lock:
                if stamp != self._stamp:
                    self._metadata = (("authorization", f"Bearer {_token(self._path)}"),)
                    self._stamp = stamp
                return self._metadata
        except OSError as error:
            raise InvalidConfiguration(
                source=str(self._path), problem=error.strerror or str(error)
            ) from error


class AuthorizedChannel(grpc.Channel):
    """A channel that adds the token to the metadata of every call made on it."""

    def __init__(self, channel: grpc.Channel, token: OwnTokenFile) -> None:
        self._channel = channel
        self._token = token

    def unary_unary(self, method: str, *shape: Any, **options: Any) -> Any:
        """See grpc.Channel."""
        return self._authorized(self._channel.unary_unary(method, *shape, **options))

    def unary_stream(self, method: str, *shape: Any, **options: Any) -> Any:
        """See grpc.Channel."""
        return self._authorized(self._channel.unary_stream(method, *shape, **options))

    def stream_unary(self, method: str, *shape: Any, **options: Any) -> Any:
        """See grpc.Channel."""
        return self._authorized(self._channel.stream_unary(method, *shape, **options))

    def stream_stream(self, method: str, *shape: Any, **options: Any) -> Any:
        """See grpc.Channel."""
        return self._authorized(self._channel.stream_stream(method, *shape, **options))

    def subscribe(self, callback: Any, try_to_connect: bool = False) -> None:  # noqa: FBT001, FBT002  grpc's own
        """See grpc.Channel."""
        self._channel.subscribe(callback, try_to_connect)

    def unsubscribe(self, callback: Any) -> None:
        """See grpc.Channel."""
        self._channel.unsubscribe(callback)

    def close(self) -> None:
        """See grpc.Channel."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _authorized(self, callable_: Callable[..., Any]) -> Callable[..., Any]:
        def call(
            request: Any, timeout: float | None = None, metadata: Iterable[tuple[str, str]] | None = None
        ) -> Any:
            return callable_(request, timeout=timeout, metadata=(*(metadata or ()), *self._token.metadata()))

        return call


def _token(path: Path) -> str:
    check_secret(path, lambda problem: InvalidConfiguration(source=str(path), problem=problem))
    token = path.read_text(encoding="ascii", errors="replace").strip()
    if not token or not token.isprintable() or " " in token:
        raise InvalidConfiguration(source=str(path), problem="is not one token")
    return token
