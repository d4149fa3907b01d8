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
    """One session that somebody missed, or what a request missed and the last session of that."""
    if answer.trace_id and not answer.misses:
        return Text(
            f"no miss of {answer.trace_id} by tenant {answer.tenant} is remembered: it missed nothing, did not send"
            f" its trace, or did so before the server began to remember ({_when(answer.remembered_since)}) or long ago."
        )
    parts: list[RenderableType] = [_misses(answer), Text()] if answer.trace_id else []
    parts.append(Text(_sentence(answer)))
    if answer.happenings:
        parts += [Text(), _happenings(answer)]
    return Group(*parts)


def _misses(answer: WhyMissResponse) -> Table:
    table = _table("LAST", "TIMES", "SESSION", "ASKED BY", "FOUND")
    for one in answer.misses:
        found = one.result.replace("_", " ")
        table.add_row(_when(one.time), str(one.count), one.session, one.access, found)
    return table


def _happenings(answer: WhyMissResponse) -> Table:
    table = _table("LAST", "FIRST", "TIMES", "EVENT", "TOKENS", "BY", "IN TRACE")
    for one in answer.happenings:
        event = MissEvent.Name(one.event).removeprefix("MISS_EVENT_").lower().replace("_", " ")
        table.add_row(
            _when(one.last_time),
            _when(one.first_time),
            str(one.count),
            event,
            str(one.token_count or "-"),
            one.detail,
            one.trace_id or "-",
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True, justify="right" if column in ("TIMES", "TOKENS") else "left")
    return table


def _sentence(answer: WhyMissResponse) -> str:
    whose = f"{answer.name} of tenant {answer.tenant}"
    if answer.is_there:
        kept = f"{answer.token_count} tokens, of which {answer.durable_token_count} are durable"
        if answer.withheld_token_count:
            paths = ", ".join(answer.lost_paths)
            return f"{whose} is there: {kept}. {answer.withheld_token_count} more are lost, until this is back: {paths}."
        return f"{whose} is there: {kept}." + ("" if answer.happenings else " Nothing was taken from it.")
    if answer.reason in REASONS:
        return f"{whose} is not there: it {REASONS[answer.reason]}."
    since = _when(answer.remembered_since)
    return (
        f"{whose} was never stored, or ended before the server began to remember ({since}), or very long ago."
    )


def _when(instant: Timestamp) -> str:
    return human_time(instant.ToDatetime(tzinfo=UTC), datetime.now(UTC))
