"""Traces, as callers name them."""

import asyncio

import pytest

from ctxcache.runtime.spans import TRACE_PARENT, current_trace_id, trace_id_of

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE_ID}-00f067aa0ba902b7-01"


@pytest.mark.parametrize("text", [PARENT, TRACE_ID, f"01{PARENT[2:]}-later"])
def test_a_trace_is_known_by_its_header_and_its_id(text: str) -> None:
    """Headers of later versions are known, too."""
    assert trace_id_of(text) == TRACE_ID


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "0" * 32,
        TRACE_ID[1:],
        TRACE_ID.upper(),
        f"ff{PARENT[2:]}",
        PARENT[:-3],
        f"{PARENT}x",
        f" {PARENT}",
        f"00-{'0' * 32}-00f067aa0ba902b7-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
    ],
)
def test_what_is_no_trace_is_none(text: str) -> None:
    """As W3C says what is valid."""
    assert trace_id_of(text) == ""


async def test_a_task_has_a_trace_of_its_own() -> None:
    """And what it begins has it too; nobody else."""

    async def one(parent: str) -> str:
        TRACE_PARENT.set(lambda: parent)
        await asyncio.sleep(0)
        return await asyncio.create_task(_current())

    assert tuple(await asyncio.gather(one(PARENT), one(""))) == (TRACE_ID, "")
    assert current_trace_id() == ""


async def _current() -> str:
    return current_trace_id()
