"""The register of a fleet: in a bucket, or in a directory for the stores of one machine.

    s3://BUCKET/PREFIX   gs://BUCKET/PREFIX   az://CONTAINER/PREFIX     conditional writes of the object store
    file:///DIRECTORY                                                   one machine only: a lock and a rename

Credentials, region and endpoint come from the environment's own variables of each service (AWS_ACCESS_KEY_ID,
AWS_ENDPOINT_URL, GOOGLE_APPLICATION_CREDENTIALS, ...). Nothing is tried again here: whoever asks has to know
that a change may have been made without an answer. Worst case: no answer, in bounded time.
"""

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ctxcache.core.fleet.register import OBJECT_LIMIT_BYTES, Entry, NoAnswer, Refused, Register
from ctxcache.errors import InvalidConfiguration

TIMEOUT_S = 5.0
"""How long a change may take: nobody waits for most of them."""
SCHEMES = ("s3", "gs", "az", "file")
NO_BUCKET = "NoSuchBucket"
"""A bucket that is missing answers as an object that is missing does, but for this word."""


def check_url(url: str) -> str:
    """The URL of a register, as it was given. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise ValueError(f"{url!r} begins with none of {', '.join(f'{scheme}://' for scheme in SCHEMES)}")
    if parts.query or parts.fragment or "@" in parts.netloc:
        raise ValueError(f"{url!r} has more than a bucket and a path: credentials come from the environment")
    if parts.scheme == "file" and (parts.netloc or not parts.path.startswith("/")):
        raise ValueError(f"{url!r} is no file:///DIRECTORY")
    if parts.scheme != "file" and not parts.netloc:
        raise ValueError(f"{url!r} names no bucket")
    return url


def open_register(url: str, *, patience_s: float = TIMEOUT_S) -> Register:
    """The register at a URL; nothing is asked of it yet. `patience_s`: how long a read may take.

    Raises InvalidConfiguration.
    """
    try:
        check_url(url)
        if urlsplit(url).scheme == "file":
            return DirectoryRegister(directory_of(url))
        return BucketRegister(url, patience_s)
    except OSError as error:
        raise InvalidConfiguration(source="fleet_bucket", problem=f"{url}: {error.strerror}") from error
    except ValueError as error:
        raise InvalidConfiguration(source="fleet_bucket", problem=str(error)) from error
    except ImportError as error:
        problem = "needs obstore: pip install 'ctxcache[fleet]'"
        raise InvalidConfiguration(source="fleet_bucket", problem=problem) from error


def directory_of(url: str) -> Path:
    """The directory that a URL of the scheme `file` names."""
    return Path(urlsplit(url).path)


class BucketRegister:
    """Objects of an object store, by its conditional writes."""

    def __init__(self, url: str, patience_s: float) -> None:
        """Raises ValueError for what the object store's client refuses, ImportError where there is none."""
        # A change that is tried again behind our back would be taken for another one's.
        self._bucket = OpenBucket(url, timeout_s=TIMEOUT_S, try_count=1)
        self._obstore, self._store = self._bucket.obstore, self._bucket.store
        self._patience_s = patience_s

    async def get(self, path: str) -> Entry | None:
        """See Register."""
        async with self._answering(path, self._patience_s):
            try:
                found = await self._obstore.get_async(self._store, path)
                # What is too long to be a fleet's is left where it is.
                is_short = found.meta["size"] <= OBJECT_LIMIT_BYTES
                body = bytes(await found.bytes_async()) if is_short else b""
            except FileNotFoundError as error:
                # A bucket that is gone has not lost its objects.
                if NO_BUCKET in str(error):
                    raise NoAnswer(f"{path}: there is no such bucket") from error
                return None
            return Entry(body, _tag(found.meta, path))

    async def create(self, path: str, body: bytes) -> str:
        """See Register."""
        return await self._put(path, body, "create")

    async def replace(self, path: str, body: bytes, tag: str) -> str:
        """See Register."""
        return await self._put(path, body, {"e_tag": tag})

    async def remove(self, path: str) -> None:
        """See Register."""
        async with self._answering(path):
            with suppress(FileNotFoundError):
                await self._obstore.delete_async(self._store, path)

    async def paths(self, folder: str) -> AsyncIterator[str]:
        """See Register."""
        listed = self._obstore.list(self._store, folder)
        while True:
            async with self._answering(folder):
                batch = await anext(aiter(listed), None)
            if batch is None:
                return
            for meta in batch:
                yield str(meta["path"])

    async def _put(self, path: str, body: bytes, mode: object) -> str:
        async with self._answering(path):
            try:
                made = await self._obstore.put_async(self._store, path, body, mode=mode, use_multipart=False)
            except self._bucket.refusals as error:
                raise Refused(path) from error
            except FileNotFoundError as error:
                if NO_BUCKET in str(error):
                    raise NoAnswer(f"{path}: there is no such bucket") from error
                # The condition was on an object that is gone.
                raise Refused(path) from error
            return _tag(made, path)

    def _answering(self, path: str, timeout_s: float = TIMEOUT_S) -> "_Answering":
        return self._bucket.answering(path, timeout_s)


class OpenBucket:
    """The object store's client for a bucket."""

    def __init__(self, url: str, *, timeout_s: float, try_count: int) -> None:
        """Raises ValueError for what the client refuses, ImportError where there is none."""
        # Not at the top: a store without a fleet needs no object store's client.
        self.obstore: Any = import_module("obstore")
        errors: Any = import_module("obstore.exceptions")
        self.refusals = (errors.AlreadyExistsError, errors.PreconditionError)
        # A missing object is Python's own error of a missing file.
        self._failures = (errors.BaseError, OSError)
        options: dict[str, Any] = {"client_options": {"timeout": f"{timeout_s:g}s", "connect_timeout": "2s"}}
        if os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://"):
            options["client_options"]["allow_http"] = True
        if url.startswith("s3://") and "AWS_REGION" not in os.environ:
            # Stores that speak S3 have no regions, and the client insists on one.
            options["config"] = {"region": os.environ.get("AWS_DEFAULT_REGION", "us-east-1")}
        retry_timeout = timedelta(seconds=timeout_s * try_count)
        options["retry_config"] = {"max_retries": try_count - 1, "retry_timeout": retry_timeout}
        try:
            self.store: Any = import_module("obstore.store").from_url(url, **options)
        except errors.BaseError as error:
            raise ValueError(_sentence(error)) from error

    def answering(self, path: str, timeout_s: float) -> "_Answering":
        """A block in which every failure is NoAnswer, and which takes no longer than that."""
        return _Answering(path, timeout_s, self._failures)


class _Answering:
    """Turns every failure within the block into NoAnswer, and bounds it."""

    def __init__(self, path: str, timeout_s: float, failures: tuple[type[Exception], ...]) -> None:
        self._path, self._failures = path, failures
        self._timeout = asyncio.timeout(timeout_s)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, *failure: object) -> None:
        error = failure[1]
        try:
            await self._timeout.__aexit__(*failure)  # type: ignore[arg-type]  # as they came
        except TimeoutError as late:
            raise NoAnswer(f"{self._path}: no answer in time") from late
        if isinstance(error, self._failures):
            raise NoAnswer(f"{self._path}: {_sentence(error)}") from error


def _tag(meta: Any, path: str) -> str:
    tag = meta["e_tag"]
    if not tag:
        raise NoAnswer(f"{path}: the bucket gives no tag")
    return str(tag)


def _sentence(error: BaseException) -> str:
    """The first line of an error of the object store's client, which has pages of them."""
    lines = str(error).splitlines()
    return lines[0][:300] if lines else type(error).__name__


class DirectoryRegister:
    """Files of one directory, for stores on one machine: a lock makes their changes conditional."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError."""
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory

    async def get(self, path: str) -> Entry | None:
        """See Register."""
        return await asyncio.to_thread(self._read, path)

    async def create(self, path: str, body: bytes) -> str:
        """See Register."""
        return await asyncio.to_thread(self._change, path, body, "")

    async def replace(self, path: str, body: bytes, tag: str) -> str:
        """See Register."""
        return await asyncio.to_thread(self._change, path, body, tag)

    async def remove(self, path: str) -> None:
        """See Register."""
        with suppress(FileNotFoundError):
            await asyncio.to_thread((self._directory / path).unlink)

    async def paths(self, folder: str) -> AsyncIterator[str]:
        """See Register."""
        for path in await asyncio.to_thread(self._listed, folder):
            yield path

    def _read(self, path: str) -> Entry | None:
        try:
            place = self._directory / path
            body = place.read_bytes() if place.stat().st_size <= OBJECT_LIMIT_BYTES else b""
        except FileNotFoundError:
            return None
        except OSError as error:
            raise NoAnswer(f"{path}: {error.strerror}") from error
        return Entry(body, _digest(body))

    def _change(self, path: str, body: bytes, tag: str) -> str:
        place = self._directory / path
        try:
            with self._locked():
                before = self._read(path)
                if (before.tag if before else "") != tag:
                    raise Refused(path)
                place.parent.mkdir(parents=True, exist_ok=True)
                # Whole or not at all: a reader takes no lock.
                made = place.with_name(f"{place.name}.new")
                with made.open("wb") as file:
                    file.write(body)
                    file.flush()
                    os.fsync(file.fileno())
                made.replace(place)
        except OSError as error:
            raise NoAnswer(f"{path}: {error.strerror}") from error
        return _digest(body)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self._directory / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _listed(self, folder: str) -> list[str]:
        found: list[str] = []
        with suppress(OSError):
            for place in sorted(self._directory.rglob("*")):
                path = place.relative_to(self._directory).as_posix()
                if path.startswith(folder) and place.suffix != ".new" and place.is_file():
                    found.append(path)
        return found


def _digest(body: bytes) -> str:
    return blake2b(body, digest_size=16).hexdigest()
