"""The pages of the metrics endpoint: what machines ask for, and the status page for people."""

from collections.abc import Mapping
from http import HTTPStatus

from ctxcache.observe.endpoint import Answer, Page
from ctxcache.observe.exposition import Exposition, Sources
from ctxcache.observe.recording import Recording
from ctxcache.observe.status_pages import StatusPages


def pages_of(sources: Sources, recording: Recording) -> Mapping[str, Page]:
    """By path: `/metrics`, `/healthz` (the event loop answers), `/readyz` (it takes work), and the status page's."""
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
