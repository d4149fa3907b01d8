"""The probe of a bucket: whether it honours conditions, tried and not believed.

A bucket that ignores a condition would let two hosts own one session, and nobody would notice. So each thing
that a fleet rests on is done here with objects of the probe's own: a create that must be refused, a replace
that must be refused, a replace of what is not there, and races in which one of many must win.
"""

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from ctxcache.core.fleet.register import NoAnswer, Refused, Register

RACERS = 16
FEW_RACERS = 4
"""Of a start: some object stores take seconds to tell sixteen writers of one object apart."""
ROUNDS = 3
PROBE = "v1/probe/"
"""The beginning of the paths of the probe's objects; they may be deleted at any time."""


@dataclass(frozen=True, slots=True)
class Tried:
    """One thing that was tried: `problem` is empty where it went as it must."""

    what: str
    problem: str
    seconds: float
    is_silent: bool = False
    """Whether the problem is that nothing was answered, which says nothing of conditions."""


class Broken(Exception):
    """The bucket did what it must not do."""


async def probe(register: Register, racers: int = RACERS) -> list[Tried]:
    """Try everything, in order; after the first failure nothing more. Raises nothing."""
    probing, results = _Probe(register, racers), list[Tried]()
    try:
        await _try_all(probing, results)
    finally:
        with suppress(NoAnswer):
            await probing.tidy_up()
    return results


async def _try_all(probing: "_Probe", results: list[Tried]) -> None:
    for what, attempt in probing.attempts():
        begun, is_silent = time.monotonic(), False
        try:
            await attempt()
            problem = ""
        except Broken as error:
            problem = str(error)
        except NoAnswer as error:
            problem, is_silent = f"no answer: {error}", True
        except Refused as error:
            problem = f"a change whose condition holds was refused: {error}"
        results.append(Tried(what, problem, time.monotonic() - begun, is_silent))
        if problem:
            return


class _Probe:
    def __init__(self, register: Register, racers: int) -> None:
        self._register, self._racers = register, racers
        self._folder = f"{PROBE}{secrets.token_hex(8)}/"
        self._path = f"{self._folder}one"

    async def tidy_up(self) -> None:
        """Remove the probe's objects. Raises NoAnswer."""
        for path in [path async for path in self._register.paths(self._folder)]:
            await self._register.remove(path)

    def attempts(self) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
        """What is tried, in order."""
        return [
            ("an object is written and read", self._writes),
            ("a second create is refused", self._refuses_create),
            ("an outdated replace is refused", self._refuses_replace),
            ("a replace of what is not there is refused", self._refuses_missing),
            (f"one of {self._racers} creators wins", self._races_to_create),
            (f"one of {self._racers} replacers wins", self._races_to_replace),
        ]

    async def _writes(self) -> None:
        tag = await self._register.create(self._path, b"first")
        found = await self._register.get(self._path)
        if found is None or found.body != b"first":
            raise Broken("what was written is not what is read")
        if found.tag != tag:
            raise Broken("a read and a write give different tags")
        await self._register.replace(self._path, b"second", tag)

    async def _refuses_create(self) -> None:
        await self._must_refuse(self._register.create(self._path, b"third"), "a create over an object")

    async def _refuses_replace(self) -> None:
        found = await self._register.get(self._path)
        if found is None or found.body != b"second":
            raise Broken("a replace is not what is read afterwards")
        await self._register.replace(self._path, b"third", found.tag)
        await self._must_refuse(
            self._register.replace(self._path, b"fourth", found.tag), "a replace by an outdated tag"
        )

    async def _refuses_missing(self) -> None:
        found = await self._register.get(self._path)
        tag = "" if found is None else found.tag
        await self._must_refuse(
            self._register.replace(f"{self._folder}none", b"x", tag),
            "a replace of an object that is not there",
        )

    async def _must_refuse(self, change: Awaitable[str], what: str) -> None:
        try:
            await change
        except Refused:
            return
        raise Broken(f"{what} was accepted: the bucket ignores conditions")

    async def _races_to_create(self) -> None:
        for round_number in range(ROUNDS):
            path = f"{self._folder}c{round_number}"
            await self._race(path, lambda body, path=path: self._register.create(path, body))  # type: ignore[misc]  # bound early

    async def _races_to_replace(self) -> None:
        for round_number in range(ROUNDS):
            path = f"{self._folder}r{round_number}"
            tag = await self._register.create(path, b"start")
            await self._race(
                path,
                lambda body, path=path, tag=tag: self._register.replace(path, body, tag),  # type: ignore[misc]  # bound early
            )

    async def _race(self, path: str, change: Callable[[bytes], Awaitable[str]]) -> None:
        bodies = [f"racer {number}".encode() for number in range(self._racers)]
        results = await asyncio.gather(*(change(body) for body in bodies), return_exceptions=True)
        winners = [body for body, result in zip(bodies, results, strict=True) if isinstance(result, str)]
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, (Refused, NoAnswer)):
                raise result
        found = await self._register.get(path)
        # Without an answer one may have won all the same; two that were told so never may.
        if len(winners) > 1:
            raise Broken(f"{len(winners)} of {self._racers} concurrent writers were told that they had won")
        if winners and (found is None or found.body != winners[0]):
            raise Broken("the object is not the winner's")
        if not winners and all(isinstance(result, Refused) for result in results):
            raise Broken("nobody won a race")
