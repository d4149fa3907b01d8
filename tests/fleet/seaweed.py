"""SeaweedFS, a real object store that honours conditions, in a directory of its own and on free ports."""

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

START_TIMEOUT_S = 60
KEY, SECRET, BUCKET = "key", "secret", "fleet"
VARIABLES = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1"}


def program() -> str | None:
    """The path of `weed`; None where it is not installed."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


class Seaweed:
    """A running one. A context manager; `kill` and `start` again keep its data and its ports."""

    def __init__(self, directory: Path, *, is_open: bool = False) -> None:
        """`is_open`: nobody is asked for a signature, so that a proxy may change what is asked."""
        self._directory = directory
        self._data, config = directory / "weed", directory / "s3.json"
        self._data.mkdir()
        actions = ["Admin", "Read", "Write", "List"]
        keys = {"credentials": [{"accessKey": KEY, "secretKey": SECRET}]}
        one = {"name": "anonymous" if is_open else "a", "actions": actions, **({} if is_open else keys)}
        config.write_text(json.dumps({"identities": [one]}))
        ports = kept_ports(6)
        self._is_open = is_open
        self.port = ports[0]
        self._command = [
            *(str(program()), "server", f"-dir={self._data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3"),
            *(f"-s3.port={ports[0]}", f"-s3.config={config}", f"-master.port={ports[1]}"),
            *(f"-s3.port.iceberg={ports[4]}", f"-s3.port.lance={ports[5]}"),
            *(f"-volume.port={ports[2]}", f"-filer.port={ports[3]}", "-volume.max=64"),
            *("-master.volumeSizeLimitMB=64", "-master.volumePreallocate=false"),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """Its S3 endpoint. Whoever asks needs VARIABLES."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start it, and wait until objects can be put."""
        with (self._directory / "weed.log").open("a") as log:
            environment = os.environ | {"HOME": str(self._directory)}
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=environment)
        deadline = time.monotonic() + START_TIMEOUT_S
        # Volumes and the bucket come with the first object that is put.
        while not _is_writing(self.endpoint, is_open=self._is_open):
            assert self._process.poll() is None, "it ended"
            assert time.monotonic() < deadline, "it does not listen"
            time.sleep(0.2)

    def kill(self) -> None:
        """SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _is_writing(endpoint: str, *, is_open: bool) -> bool:
    store = S3Store(
        BUCKET,
        endpoint=endpoint,
        access_key_id=KEY,
        secret_access_key=SECRET,
        region="us-east-1",
        skip_signature=is_open,
        client_options={"allow_http": True, "timeout": "5s"},
        retry_config={"max_retries": 0},
    )
    try:
        obstore.put(store, "first", b"x")
    except BaseError:
        return False
    return True


def kept_ports(count: int) -> list[int]:
    """Free ports that stay so until they are bound, however often: the system gives them to no connection.

    Each has its gRPC port, 10,000 above, free as well.
    """
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as one, socket.socket() as other, contextlib.suppress(OSError):
            # Below those that connections get (net.ipv4.ip_local_port_range).
            port = secrets.randbelow(12_000) + 10_000
            one.bind(("127.0.0.1", port))
            other.bind(("127.0.0.1", port + 10_000))
            if port not in found:
                found.append(port)
    return found
