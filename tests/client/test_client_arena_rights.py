"""The rights of local clients on the arena.

Tried by a client that is not ours, against a real server, and by ours beside it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from far_side import KV, LAYOUT, OWN, SPEC, make_rows
from server_process import ServerProcess, write_secret

import ctxcache
from ctxcache.client import BlockSpace, Client
from ctxcache.errors import PermissionDenied, Unavailable
from ctxcache.identity import ArenaGrant, Token, digest_of
from ctxcache.v1 import arena_pb2
from ctxcache.v1.arena_pb2 import Operation
from lab.routes import Route, route_options

STRANGER = 12345
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
ATTEMPTS = r"""
import ctypes, fcntl, json, mmap, os, socket, struct, sys

uid, path, size = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
PAGE = 4096
control = socket.socket(socket.AF_UNIX)
control.settimeout(20)
if uid:
    os.setgid(uid)
    os.setuid(uid)
control.connect(path)
# ControlHello: protocol_version 1, asks_to_write.
hello = bytes([8, 1, 24, 1])
control.sendall(struct.pack("<IB", len(hello), 1) + hello)
fds = socket.recv_fds(control, 65536, 4)[1]
fd = fds[0]

def checked(result):
    if result in (-1, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "refused")
    return result

def mapped(fd, protection):
    return checked(libc.mmap(None, ctypes.c_size_t(size), protection, mmap.MAP_SHARED, fd, ctypes.c_long(0)))

def write_to(fd):
    ctypes.memset(mapped(fd, 3) + PAGE, 0x5A, 64)

def make_writable():
    at = mapped(fd, 1)
    checked(libc.mprotect(ctypes.c_void_p(at), ctypes.c_size_t(size), 3))
    ctypes.memset(at + PAGE, 0x5A, 64)

def remove_pages():
    checked(libc.madvise(ctypes.c_void_p(mapped(fd, 1)), ctypes.c_size_t(size), 9))

def reopened(flags):
    return os.open(f"/proc/self/fd/{fd}", flags)

def after_chmod():
    os.fchmod(fd, 0o666)
    write_to(reopened(os.O_RDWR))

def punch(fd):
    checked(libc.fallocate(fd, 3, ctypes.c_long(0), ctypes.c_long(PAGE)))

def set_flags():
    fcntl.fcntl(fd, fcntl.F_SETFL, os.O_RDWR)
    write_to(fd)

def lift_seals():
    checked(libc.fcntl(fd, fcntl.F_ADD_SEALS, 0))
    write_to(fd)

attempts = {
    "mmap": lambda: write_to(fd),
    "mprotect": make_writable,
    "madvise": remove_pages,
    "pwrite": lambda: os.pwrite(fd, b"Z" * 64, PAGE),
    "set flags": set_flags,
    "seals": lift_seals,
    "punch": lambda: punch(fd),
    "ftruncate": lambda: os.ftruncate(fd, PAGE),
    "truncate": lambda: os.truncate(f"/proc/self/fd/{fd}", PAGE),
    "reopen": lambda: write_to(reopened(os.O_RDWR)),
    "reopen, pwrite": lambda: os.pwrite(reopened(os.O_RDWR), b"Z" * 64, PAGE),
    "reopen, punch": lambda: punch(reopened(os.O_RDWR)),
    "reopen, ftruncate": lambda: os.ftruncate(reopened(os.O_RDWR), PAGE),
    "reopen, empty": lambda: reopened(os.O_WRONLY | os.O_TRUNC),
    "chmod, reopen": after_chmod,
}
done = []
for name, attempt in attempts.items():
    try:
        attempt()
    except OSError:
        continue
    done.append(name)
print(json.dumps({"fds": len(fds), "size": os.fstat(fd).st_size, "done": done}))
"""


def attempts(server: ServerProcess, *, uid: int = 0) -> dict[str, Any]:
    """The things that a client without our library can do with the control socket's descriptors."""
    given = (str(uid), server.ready["control_socket"], str(server.ready["arena"]["size_bytes"]))
    # The other user cannot read this environment, and must not need it.
    ran = subprocess.run(
        [sys.executable, "-I", "-c", ATTEMPTS, *given],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd="/",
    )
    assert not ran.returncode, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server to whose arena nobody else writes."""
    data = tmp_path_factory.mktemp("sealed") / "data"
    with ServerProcess(data, "--arena-sealed", "true") as process:
        yield process


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """A server with a token that may write in place, one that may only read there, and a user that may."""
    grants = {
        "writer": ArenaGrant("a", has_shared_memory=True, writes_in_place=True),
        "reader": ArenaGrant("a", has_shared_memory=True),
    }
    # Other users cannot enter what pytest makes.
    with TemporaryDirectory(prefix="ctxcache-rights-") as made:
        place = Path(made)
        (place / "run").mkdir()
        for path in (place, place / "run"):
            path.chmod(0o711)
        lines = [Token(name, digest_of(name), grant).line() for name, grant in grants.items()]
        write_secret(place / "hashes", "\n".join(lines))
        for name in grants:
            write_secret(place / name, name)
        with ServerProcess(
            place / "data",
            "--token-hashes",
            str(place / "hashes"),
            "--control-socket",
            str(place / "run" / "control.sock"),
            "--identities",
            f"uid:{STRANGER}=far:shared-memory",
        ) as process:
            yield process


@pytest.fixture
def connect(server: ServerProcess) -> Iterator[Callable[..., Client]]:
    """Clients by the name of their token, closed at the end."""
    opened: list[Client] = []

    def open_one(token: str, access: Route = "auto") -> Client:
        file = server.data_directory.parent / token
        opened.append(ctxcache.connect(server.target, timeout_s=20, **route_options(access), token_file=file))
        return opened[-1]

    yield open_one
    for client in opened:
        client.close()


def stored_twice(client: Client, name: str) -> npt.NDArray[np.generic]:
    """Append at once and by a writer; the rows as they are read afterwards."""
    client.models.register(SPEC)
    session = client.sessions.open(client.sessions.create(OWN, id=name, layout=LAYOUT).info, OWN).append(
        make_rows(70)
    )
    with client.sessions.open(session, OWN).writer(5) as writer:
        for stream, rows in make_rows(5, first=70).items():
            writer.write(stream, 0, rows)
        writer.commit()
    with client.sessions.open(session.name, OWN).read() as read:
        assert read.is_local
        return np.array(read.array(KV))


@AS_ROOT
def test_another_user_that_may_read_gets_nothing_to_write_with(server: ServerProcess) -> None:
    """Not by the descriptor it is given, nor by what the kernel makes of it.

    A descriptor to write through is not given.
    """
    assert attempts(server, uid=STRANGER) == {
        "fds": 1,
        "size": server.ready["arena"]["size_bytes"],
        "done": [],
    }


def test_of_a_sealed_arena_nobody_gets_anything_to_write_with(sealed: ServerProcess) -> None:
    """Not the server's own user, who may open it anew, and not root; the server goes on to write."""
    before = attempts(sealed)
    with ctxcache.connect(sealed.target) as client:
        found = stored_twice(client, "sealed")

    assert before == {"fds": 1, "size": sealed.ready["arena"]["size_bytes"], "done": []}
    np.testing.assert_array_equal(found, make_rows(75)[KV])
    assert sealed.ready["arena"]["path"] == "memfd:ctxcache-arena"


def test_blocks_come_by_stream_where_nobody_may_write(sealed: ServerProcess) -> None:
    """And are read in place; room that is asked for all the same is refused."""
    space, key = BlockSpace(model_fingerprint=bytes(32)), bytes(31) + b"k"
    with ctxcache.connect(sealed.target) as client:
        assert client.blocks.put(space, {key: b"some bytes"}) == 1
        [loaded] = client.blocks.load(space, [key])
        attachment = client.routes.attach()
        assert attachment is not None
        reserve = Operation()
        reserve.reserve_blocks.space.model_fingerprint = bytes(32)
        reserve.reserve_blocks.space.parts.add(layer_end=1)
        reserve.reserve_blocks.blocks.add(key=bytes(32), part_bytes=[5])
        with pytest.raises(PermissionDenied):
            attachment.stream.carry_out(reserve)

    assert loaded is not None
    assert loaded[0].tobytes() == b"some bytes"


@pytest.mark.parametrize("access", ["auto", "local-socket", "local-grpc"])
def test_without_the_grant_rows_are_read_in_place_and_appended_by_stream(
    connect: Callable[..., Client], access: Route
) -> None:
    """An append needs no grant, only another way; a reservation that is asked for all the same is refused."""
    client = connect("reader", access)
    found = stored_twice(client, f"read-{access}")
    session = client.sessions.get(f"sessions/read-{access}")
    attachment = client.routes.attach()
    assert attachment is not None
    reserve = arena_pb2.Reserve(
        session=session.name, model_fingerprint=session.model_fingerprint, write_offset=75, token_count=1
    )
    with pytest.raises(PermissionDenied, match="may not write in place here: append by stream"):
        attachment.stream.carry_out(arena_pb2.Operation(reserve=reserve))
    with pytest.raises(Unavailable, match="may not be written"):
        client.sessions.decode_batch([session.name], OWN)

    assert attachment.arena.writable() is None
    np.testing.assert_array_equal(found, make_rows(75)[KV])
    assert client.sessions.get(session.name).token_count == 75


@pytest.mark.parametrize("access", ["local-socket", "local-grpc"])
def test_with_the_grant_rows_are_written_in_place(connect: Callable[..., Client], access: Route) -> None:
    """As by everybody where nobody is told apart."""
    client = connect("writer", access)
    client.models.register(SPEC)
    session = client.sessions.create(OWN, id=f"written-{access}", layout=LAYOUT)
    with session.writer(70) as writer:
        assert writer.is_local
        for stream, rows in make_rows(70).items():
            writer.write(stream, 0, rows)
        writer.commit()
    with client.sessions.open(session.name, OWN).read() as read:
        np.testing.assert_array_equal(read.array(KV), make_rows(70)[KV])
