"""Objects of a bucket that are made once and never changed: rows of sessions that hosts share.

Names are drawn once, so that an object that is there already was made by an earlier try. Worst case: no
answer, in bounded time.
"""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from typing_extensions import Buffer

from ctxcache.core.fleet.register import NoAnswer
from ctxcache.storage.register import NO_BUCKET, OpenBucket, directory_of

TIMEOUT_S = 20.0
TRIES = 3
UNFINISHED = ".new"


class Stored(NamedTuple):
    """An object, and when it was made by the bucket's own clock, in seconds."""

    body: Buffer
    modified_s: float


class Listed(NamedTuple):
    """An object in a list."""

    path: str
    size_bytes: int
    modified_s: float


class Objects(Protocol):
    """The calls of a place for objects. Every one of them may raise NoAnswer."""

    async def put(self, path: str, body: Buffer) -> None:
        """Make an object of a name that was drawn for it."""

    async def get(self, path: str, limit_bytes: int) -> Stored | None:
        """The object; None where there is none. A longer one counts as empty."""

    async def modified_s(self, path: str) -> float | None:
        """When the object was last written, by the bucket's clock; None where there is none."""

    async def remove(self, paths: Sequence[str]) -> None:
        """Remove objects; those that are gone already are no error."""

    def listed(self, folder: str) -> AsyncIterator[Listed]:
        """The objects below a folder, `a/b/`, in no order."""


def open_objects(url: str) -> Objects:
    """The place for objects at a register's URL, which was checked. Raises OSError, ValueError."""
    return DirectoryObjects(directory_of(url)) if url.startswith("file:") else BucketObjects(url)


class BucketObjects:
    """Objects of an object store."""

    def __init__(self, url: str) -> None:
        # What is never changed may be asked for again.
        self._bucket = OpenBucket(url, timeout_s=TIMEOUT_S, try_count=TRIES)
        self._obstore, self._store = self._bucket.obstore, self._bucket.store

    async def put(self, path: str, body: Buffer) -> None:
        """See Objects."""
        async with self._bucket.answering(path, TIMEOUT_S * TRIES):
            with suppress(*self._bucket.refusals):
                await self._obstore.put_async(self._store, path, body, mode="create", use_multipart=False)

    async def get(self, path: str, limit_bytes: int) -> Stored | None:
        """See Objects."""
        async with self._bucket.answering(path, TIMEOUT_S):
            try:
                found = await self._obstore.get_async(self._store, path)
                is_short = found.meta["size"] <= limit_bytes
                body: Buffer = await found.bytes_async() if is_short else b""
            except FileNotFoundError as error:
                _check_bucket(path, error)
                return None
            return Stored(body, found.meta["last_modified"].timestamp())

    async def modified_s(self, path: str) -> float | None:
        """See Objects."""
        async with self._bucket.answering(path, TIMEOUT_S):
            try:
                found = await self._obstore.head_async(self._store, path)
            except FileNotFoundError as error:
                _check_bucket(path, error)
                return None
            return float(found["last_modified"].timestamp())

    async def remove(self, paths: Sequence[str]) -> None:
        """See Objects."""
        for path in paths:
            async with self._bucket.answering(path, TIMEOUT_S):
                with suppress(FileNotFoundError):
                    await self._obstore.delete_async(self._store, path)

    async def listed(self, folder: str) -> AsyncIterator[Listed]:
        """See Objects."""
        batches = self._obstore.list(self._store, folder)
        while True:
            async with self._bucket.answering(folder, TIMEOUT_S):
                batch = await anext(aiter(batches), None)
            if batch is None:
                return
            for meta in batch:
                yield Listed(str(meta["path"]), int(meta["size"]), meta["last_modified"].timestamp())


# A bucket that is gone has not lost its objects.
def _check_bucket(path: str, error: FileNotFoundError) -> None:
    if NO_BUCKET in str(error):
        raise NoAnswer(f"{path}: there is no such bucket") from error


class DirectoryObjects:
    """Files of one directory, for stores on one machine."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def put(self, path: str, body: Buffer) -> None:
        """See Objects."""
        await asyncio.to_thread(self._write, path, body)

    async def get(self, path: str, limit_bytes: int) -> Stored | None:
        """See Objects."""
        return await asyncio.to_thread(self._read, path, limit_bytes)

    async def modified_s(self, path: str) -> float | None:
        """See Objects."""
        with _answering(path), suppress(FileNotFoundError):
            return (await asyncio.to_thread((self._directory / path).stat)).st_mtime
        return None

    async def remove(self, paths: Sequence[str]) -> None:
        """See Objects."""
        for path in paths:
            with _answering(path), suppress(FileNotFoundError):
                await asyncio.to_thread((self._directory / path).unlink)

    async def listed(self, folder: str) -> AsyncIterator[Listed]:
        """See Objects."""
        for found in await asyncio.to_thread(self._below, folder):
            yield found

    def _write(self, path: str, body: Buffer) -> None:
        place = self._directory / path
        with _answering(path):
            place.parent.mkdir(parents=True, exist_ok=True)
            # Whole or not at all, and never in the place of another one.
            made = place.with_name(f"{place.name}.{secrets.token_hex(4)}{UNFINISHED}")
            try:
                with made.open("wb") as file:
                    file.write(body)
                    file.flush()
                    os.fsync(file.fileno())
                with suppress(FileExistsError):
                    place.hardlink_to(made)
            finally:
                made.unlink(missing_ok=True)

    def _read(self, path: str, limit_bytes: int) -> Stored | None:
        with _answering(path), suppress(FileNotFoundError):
            place = self._directory / path
            facts = place.stat()
            return Stored(place.read_bytes() if facts.st_size <= limit_bytes else b"", facts.st_mtime)
        return None

    def _below(self, folder: str) -> list[Listed]:
        found: list[Listed] = []
        with _answering(folder):
            for place in (self._directory / folder).rglob("*"):
                # Another process may remove what was just listed.
                with suppress(FileNotFoundError):
                    facts = place.stat()
                    if place.is_file() and place.suffix != UNFINISHED:
                        path = place.relative_to(self._directory).as_posix()
                        found.append(Listed(path, facts.st_size, facts.st_mtime))
        return found


@contextmanager
def _answering(path: str) -> Iterator[None]:
    """Turns the filesystem's errors within the block into NoAnswer, but that of a missing file."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise NoAnswer(f"{path}: {error.strerror}") from error
