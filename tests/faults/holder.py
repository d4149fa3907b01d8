"""A client process that holds something and does nothing: what others kill or stop.

    python -m tests.faults.holder TARGET lease|reservation|read|append SESSION...

Prints `held` once it holds one of each session; then waits for ever, reading nothing more.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import grpc

import ctxcache
from ctxcache.client import Client
from ctxcache.v1.session_pb2 import AppendHeader, AppendSessionRequest, ReadSessionRequest
from ctxcache.v1.session_pb2_grpc import SessionServiceStub
from tests.stored_model import stored_model

NEW_TOKENS = 64


def lease(target: str, names: list[str]) -> list[Any]:
    """Lease all tokens of each."""
    client = ctxcache.connect(target, access="local")
    return [client, *(client.sessions.open(name, stored_model(client, name)).read() for name in names)]


def reservation(target: str, names: list[str]) -> list[Any]:
    """Reserve room behind each."""
    client = ctxcache.connect(target, access="local")
    return [
        client,
        *(client.sessions.open(name, stored_model(client, name)).writer(NEW_TOKENS) for name in names),
    ]


def read(target: str, names: list[str]) -> list[Any]:
    """Begin to read each by stream, take the header, and nothing after it."""
    channel, client = grpc.insecure_channel(target), ctxcache.connect(target, access="remote")
    stub = SessionServiceStub(channel)
    held: list[Any] = [channel]
    for name in names:
        fingerprint = client.sessions.get(name).model_fingerprint
        call = stub.ReadSession(ReadSessionRequest(name=name, model_fingerprint=fingerprint))
        next(call)
        held.append(call)
    return held


def append(target: str, names: list[str]) -> list[Any]:
    """Begin to append to each by stream, send the header, and nothing after it."""
    channel, client = grpc.insecure_channel(target), ctxcache.connect(target, access="remote")
    stub = SessionServiceStub(channel)
    return [channel, *(_begin_append(stub, client, name) for name in names)]


def _begin_append(stub: SessionServiceStub, client: Client, name: str) -> Any:
    session = client.sessions.get(name)
    header = AppendHeader(
        name=name, model_fingerprint=session.model_fingerprint, write_offset=session.token_count
    )

    def requests() -> Any:
        yield AppendSessionRequest(header=header)
        time.sleep(1 << 20)

    return stub.AppendSession.future(requests())


KINDS: dict[str, Callable[[str, list[str]], list[Any]]] = {
    "lease": lease, "reservation": reservation, "read": read, "append": append,
}  # fmt: skip

if __name__ == "__main__":
    held = KINDS[sys.argv[2]](sys.argv[1], sys.argv[3:])
    sys.stdout.write("held\n")
    sys.stdout.flush()
    time.sleep(1 << 20)
