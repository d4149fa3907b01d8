"""The audit log: who asked what of the whole server, and what came of it.

One line of `key=value` for each call, values in JSON so that none can forge another; logger `ctxcache.audit`.
Callers that were refused are logged there too, by `callers.py`.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from google.protobuf import text_format
from google.protobuf.json_format import MessageToDict, SerializeToJsonError
from google.protobuf.message import Message

from ctxcache.errors import CacheError
from ctxcache.service.callers import OPERATORS_ONLY, current
from ctxcache.v1 import admin_pb2  # noqa: F401  # its descriptors are read
from ctxcache.wire.methods import unchanging

audit_log = logging.getLogger("ctxcache.audit")

UNCHANGING = frozenset(f"{OPERATORS_ONLY}{method}" for method in unchanging("AdminService"))
REQUEST_CHARACTERS = 512
# Building JSON of a large message takes milliseconds of the loop.
WHOLE_REQUEST_BYTES = 16 << 10
"""Largest request that is written out. The log has only names and size of a larger one.

Spelling it out would hold up the event loop.
"""


def is_audited(method: str) -> bool:
    """Whether it is an operator's and changes something."""
    # Operators' calls that change nothing are too many for a log that people read.
    return method.startswith(OPERATORS_ONLY) and method not in UNCHANGING


def audited_call(behaviour: Callable[..., Awaitable[Any]], method: str) -> Callable[..., Awaitable[Any]]:
    """An rpc with one answer, which is written down when it ends."""

    async def call(request: Any, context: Any) -> Any:
        try:
            answer = await behaviour(request, context)
        except BaseException as error:
            _write(method, request, _result(error))
            raise
        _write(method, request, "OK")
        return answer

    return call


def audited_for_others(
    behaviour: Callable[..., Awaitable[Any]], method: str
) -> Callable[..., Awaitable[Any]]:
    """An rpc with one answer, which is written down where an operator makes it for another tenant."""
    audited = audited_call(behaviour, method)

    async def call(request: Any, context: Any) -> Any:
        return await (audited if current().acts_for else behaviour)(request, context)

    return call


def audited_stream(
    behaviour: Callable[..., AsyncGenerator[Any]], method: str
) -> Callable[..., AsyncGenerator[Any]]:
    """An rpc with many answers, which is written down when it begins and when it ends."""

    async def call(request: Any, context: Any) -> AsyncGenerator[Any]:
        _write(method, request, "BEGUN")
        try:
            async with aclosing(behaviour(request, context)) as answers:
                async for answer in answers:
                    yield answer
        except BaseException as error:
            _write(method, request, _result(error))
            raise
        _write(method, request, "OK")

    return call


def _write(method: str, request: Any, result: str) -> None:
    caller = current()
    # JSON strings: a name with a line break or an equals sign cannot forge a line.
    asked = json.dumps(_plain(request), separators=(",", ":"))
    audit_log.info(
        "audit subject=%s tenant=%s role=%s method=%s request=%s result=%s",
        json.dumps(caller.subject),
        caller.tenant,
        caller.grant.role.value,
        method.rpartition("/")[2],
        asked[:REQUEST_CHARACTERS],
        result,
    )


def _plain(request: Message) -> Any:
    """The request as JSON. An invalid Duration, which protobuf refuses to encode, is written as text."""
    size_bytes = request.ByteSize()
    if size_bytes > WHOLE_REQUEST_BYTES:
        names = {
            field.name: value[:REQUEST_CHARACTERS]
            for field, value in request.ListFields()
            if isinstance(value, str)
        }
        return names | {"size_bytes": size_bytes}
    try:
        return MessageToDict(request, preserving_proto_field_name=True)
    except SerializeToJsonError:
        return text_format.MessageToString(request, as_one_line=True)


def _result(error: BaseException) -> str:
    if isinstance(error, CacheError):
        return error.reason
    # A client that ends the call ends a pass in order.
    return "ENDED" if isinstance(error, (asyncio.CancelledError, GeneratorExit)) else "INTERNAL"
