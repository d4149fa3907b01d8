"""The answer of `why-miss` for people: a sentence, and what happened."""

from datetime import UTC, datetime

from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ctxcache.cli.units import human_time
from ctxcache.v1.admin_pb2 import MissEvent, WhyMissResponse

REASONS = {
    MissEvent.MISS_EVENT_EVICTED: "was evicted",
    MissEvent.MISS_EVENT_EXPIRED: "has expired",
    MissEvent.MISS_EVENT_DELETED: "was deleted",
}


def why_miss_view(answer: WhyMissResponse) -> RenderableType:
    """One session that somebody missed."""
    sentence = Text(_sentence(answer))
    if not answer.happenings:
        return sentence
    table = Table(box=None, pad_edge=False)
    for column in ("LAST", "FIRST", "TIMES", "EVENT", "TOKENS", "BY"):
        table.add_column(column, no_wrap=True, justify="right" if column in ("TIMES", "TOKENS") else "left")
    for one in answer.happenings:
        event = MissEvent.Name(one.event).removeprefix("MISS_EVENT_").lower().replace("_", " ")
        table.add_row(
            _when(one.last_time),
            _when(one.first_time),
            str(one.count),
            event,
            str(one.token_count or "-"),
            one.detail,
        )
    return Group(sentence, Text(), table)


def _sentence(answer: WhyMissResponse) -> str:
    whose = f"{answer.name} of tenant {answer.tenant}"
    if answer.is_there:
        kept = f"{answer.token_count} tokens, of which {answer.durable_token_count} are durable"
        return f"{whose} is there: {kept}." + ("" if answer.happenings else " Nothing was taken from it.")
    if answer.reason in REASONS:
        return f"{whose} is not there: it {REASONS[answer.reason]}."
    since = _when(answer.remembered_since)
    return (
        f"{whose} was never stored, or ended before the server began to remember ({since}), or very long ago."
    )


def _when(instant: Timestamp) -> str:
    return human_time(instant.ToDatetime(tzinfo=UTC), datetime.now(UTC))
