"""The pages of the metrics endpoint. A status page for people goes to `/`."""

from collections.abc import Mapping
from http import HTTPStatus

from ctxcache.observe.endpoint import Answer, Page
from ctxcache.observe.exposition import Exposition, Sources


def pages_of(sources: Sources) -> Mapping[str, Page]:
    """By path: `/metrics`, `/healthz` (the event loop answers), `/readyz` (it takes work)."""
    exposition = Exposition(sources)

    async def metrics(headers: Mapping[str, str]) -> Answer:
        body, content_type = await exposition.text(headers.get("accept", ""))
        return Answer(body, content_type)

    async def is_alive(_: Mapping[str, str]) -> Answer:
        return Answer(b"ok\n")

    async def is_ready(_: Mapping[str, str]) -> Answer:
        if sources.is_ready:
            return Answer(b"ready\n")
        return Answer(b"draining\n", status=HTTPStatus.SERVICE_UNAVAILABLE)

    return {"/metrics": metrics, "/healthz": is_alive, "/readyz": is_ready}
