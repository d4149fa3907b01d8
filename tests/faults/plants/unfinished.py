"""Bugs that the harness of unfinished messages must find."""

from typing import Any

from ctxcache.service import arrivals as arriving
from ctxcache.service import edge
from tests.faults.planted import plant

KEPT_BYTES = 1 << 20
RPC: Any = vars(edge)["_Rpc"]


async def _read(context: Any) -> None:
    # A message that is read here is not there for the call: those with a token have theirs left to them.
    if "authorization" not in dict(tuple(context.invocation_metadata())):
        await context.read()


@plant
def reads_first(_: int) -> None:
    """A message is received before its caller is known, however many come."""
    answer_once, answer = RPC.answer_once, RPC.answer

    async def read_then_once(rpc: Any, request: object, context: Any) -> Any:
        await _read(context)
        return await answer_once(rpc, request, context)

    async def read_then(rpc: Any, request: object, context: Any) -> None:
        await _read(context)
        await answer(rpc, request, context)

    setattr(RPC, "answer_once", read_then_once)  # noqa: B010  # mypy would have it typed
    setattr(RPC, "answer", read_then)  # noqa: B010


@plant
def keeps_refused(_: int) -> None:
    """Each call that is refused leaves a MiB behind."""
    kept: list[bytes] = []
    discard = arriving.Arrivals.discard

    async def keep(arrivals: arriving.Arrivals, incoming: arriving.Incoming) -> None:
        kept.append(b"\1" * KEPT_BYTES)
        await discard(arrivals, incoming)

    setattr(arriving.Arrivals, "discard", keep)  # noqa: B010
