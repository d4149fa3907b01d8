"""The pages of the metrics endpoint: metrics for machines; the status page and its JSON for people.

Bounded: a status is made at most once in FRESH_S, for all requests of that time. Sessions are looked through
at most once in SCAN_S, and the text is made in a thread. Names of sessions and engines are shown only where
the settings say so. A browser sees names only under a host name that no other page can point here.
"""

import asyncio
import ipaddress
import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from http import HTTPStatus
from importlib.resources import files
from time import monotonic

from ctxcache.observe.endpoint import Answer, Page
from ctxcache.observe.exposition import Exposition, Sources
from ctxcache.observe.moment import Recording
from ctxcache.observe.status import Engine, SessionList, Status, listed_engines, listed_sessions, status_of
from ctxcache.observe.status_page import page

FRESH_S = 1.0
SCAN_S = 10.0


class StatusPages:
    """Makes a status when it is asked for. Owned by the event loop."""

    def __init__(self, sources: Sources, recording: Recording) -> None:
        self._sources, self._recording = sources, recording
        self._turn = asyncio.Lock()
        self._made: dict[bool, tuple[float, Status]] = {}
        self._sessions: tuple[float, SessionList] | None = None

    def pages(self) -> Mapping[str, Page]:
        """By path."""
        web = files("ctxcache.observe") / "web"
        css, script = ((web / name).read_bytes() for name in ("status.css", "status.js"))
        return {
            "/": self._html,
            "/status.json": self._json,
            "/status.css": partial(_fixed, Answer(css, "text/css; charset=utf-8")),
            "/status.js": partial(_fixed, Answer(script, "text/javascript; charset=utf-8")),
        }

    async def _html(self, headers: Mapping[str, str]) -> Answer:
        status = await self._status(headers)
        text = await asyncio.to_thread(page, status)
        return Answer(text.encode(errors="replace"), "text/html; charset=utf-8")

    async def _json(self, headers: Mapping[str, str]) -> Answer:
        status = await self._status(headers)
        text = await asyncio.to_thread(lambda: json.dumps(asdict(status)))
        return Answer(text.encode(), "application/json")

    async def _status(self, headers: Mapping[str, str]) -> Status:
        with_names = self._sources.shows_names() and is_own_name(headers.get("host", ""))
        async with self._turn:
            made = self._made.get(with_names)
            if made is None or monotonic() - made[0] > FRESH_S:
                made = self._made[with_names] = (monotonic(), await self._make(with_names=with_names))
            return made[1]

    async def _make(self, *, with_names: bool) -> Status:
        cache = self._sources.cache
        sessions: SessionList | None = None
        engines: tuple[Engine, ...] | None = None
        if with_names:
            if self._sessions is None or monotonic() - self._sessions[0] > SCAN_S:
                self._sessions = (monotonic(), await listed_sessions(cache))
            sessions, engines = self._sessions[1], listed_engines(cache)
        return status_of(
            self._recording.read(),
            self._recording.ring,
            now_s=cache.state.clock.wall_ns() / 10**9,
            promotion_count=cache.promotions.running_count,
            settings=self._sources.settings(),
            sessions=sessions,
            engines=engines,
        )


async def _fixed(answer: Answer, _: Mapping[str, str]) -> Answer:
    return answer


def is_own_name(host: str) -> bool:
    """Whether a request's Host is an address, or localhost: no name that somebody could have pointed here."""
    name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
    if name == "localhost":
        return True
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def pages_of(sources: Sources, recording: Recording) -> Mapping[str, Page]:
    """By path.

    `/metrics`, `/healthz` (the event loop answers), `/readyz` (it takes work), and the status page's.
    """
    exposition = Exposition(sources)

    async def metrics(headers: Mapping[str, str]) -> Answer:
        body, content_type = await exposition.text(headers.get("accept", ""))
        return Answer(body, content_type)

    async def is_alive(_: Mapping[str, str]) -> Answer:
        return Answer(b"ok\n")

    async def is_ready(_: Mapping[str, str]) -> Answer:
        problem = sources.why_not_ready
        if not problem:
            return Answer(b"ready\n")
        return Answer(f"{problem}\n".encode(), status=HTTPStatus.SERVICE_UNAVAILABLE)

    machines = {"/metrics": metrics, "/healthz": is_alive, "/readyz": is_ready}
    return machines | dict(StatusPages(sources, recording).pages())
