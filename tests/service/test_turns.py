"""Bulk work takes turns, in order, and leaves the loop to others in between."""

import asyncio

from ctxcache.service.turns import TURNS_BETWEEN, Turns


async def test_pieces_are_done_one_after_another_with_turns_for_others_between() -> None:
    """Whoever comes first goes first, and between two pieces others have had their turns."""
    turns, log = Turns(), list[str]()

    async def bulk(name: str) -> None:
        for _ in range(2):
            await turns.take()
            log.append(name)
            await asyncio.sleep(0)

    async def other() -> None:
        while len([name for name in log if name != "."]) < 4:
            log.append(".")
            await asyncio.sleep(0)

    await asyncio.gather(bulk("a"), bulk("b"), other())

    assert [name for name in log if name != "."] == ["a", "b", "a", "b"]
    gaps = "".join(log).split("a")[1].split("b")[0]
    assert gaps.count(".") >= TURNS_BETWEEN


async def test_who_gives_up_waiting_holds_up_nobody() -> None:
    """A stream that ends while it waits for its turn is passed over."""
    turns = Turns()
    await turns.take()
    waiting = [asyncio.ensure_future(turns.take()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()

    await asyncio.wait_for(asyncio.gather(*waiting[1:]), 10)
    await asyncio.wait_for(turns.take(), 10)
