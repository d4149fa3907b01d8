"""Bugs that the drain harness must find."""

import importlib
import os
import threading
from collections.abc import Mapping, Sequence

from ctxcache.cache import Cache
from ctxcache.core.ledger.session import Session
from ctxcache.service.control_socket import ControlSocket
from ctxcache.service.health import Health
from tests.faults.planted import plant


@plant
def flush_left_out(_: int) -> None:
    """The end is quick."""

    async def flush_all(
        _cache: Cache, _sessions: Sequence[Session], *, at_a_time: int
    ) -> Mapping[Session, BaseException | None]:
        del at_a_time
        return {}

    setattr(Cache, "_flush_all", flush_all)  # noqa: B010  # mypy would have it typed


@plant
def cut_at_once(_: int) -> None:
    """No call is waited for."""
    server_class = importlib.import_module("grpc.aio._server").Server
    stop, end = server_class.stop, ControlSocket.stop
    setattr(server_class, "stop", lambda server, _: stop(server, None))  # noqa: B010
    setattr(ControlSocket, "stop", lambda control, _: end(control, 0.0))  # noqa: B010


@plant
def serving_to_the_end(_: int) -> None:
    """Health is told once."""
    known = Health.tell

    def only_yes(told: Health, *, is_serving: bool) -> None:
        if is_serving:
            known(told, is_serving=True)

    setattr(Health, "tell", only_yes)  # noqa: B010


@plant
def device_hangs(_: int) -> None:
    """A sync never returns, and nothing can interrupt it."""
    setattr(os, "fdatasync", lambda _: threading.Event().wait())  # noqa: B010
