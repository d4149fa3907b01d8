"""The client: what an engine needs to keep sessions in a server and to restore them.

A name is imported when it is first used: `ctxcache.client.types` alone imports neither gRPC nor protobuf.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ctxcache.client.block_bytes import MemoryRows, Scattered
    from ctxcache.client.client import Client, connect
    from ctxcache.client.convert import document
    from ctxcache.client.credentials import ClientTls
    from ctxcache.client.decode_batch import DecodeBatch
    from ctxcache.client.engine_queue import EngineQueue, QueuedJob
    from ctxcache.client.rows import RowPiece, SessionRows
    from ctxcache.client.sessions import SessionHandle
    from ctxcache.client.types import (
        BlockPart,
        BlockSpace,
        CallerModel,
        Durability,
        SessionInfo,
        days,
        hidden,
        hours,
        kv,
        latent,
        minutes,
        seconds,
    )
    from ctxcache.client.writer import SessionWriter
    from ctxcache.format.model import ModelSpec
    from ctxcache.format.streams import OPAQUE, TOKENS, Content

__all__ = [
    "OPAQUE",
    "TOKENS",
    "BlockPart",
    "BlockSpace",
    "CallerModel",
    "Client",
    "ClientTls",
    "Content",
    "DecodeBatch",
    "Durability",
    "EngineQueue",
    "MemoryRows",
    "ModelSpec",
    "QueuedJob",
    "RowPiece",
    "Scattered",
    "SessionHandle",
    "SessionInfo",
    "SessionRows",
    "SessionWriter",
    "connect",
    "days",
    "document",
    "hidden",
    "hours",
    "kv",
    "latent",
    "minutes",
    "seconds",
]
_MODULES = {
    "Client": "client",
    "ClientTls": "credentials",
    "DecodeBatch": "decode_batch",
    "EngineQueue": "engine_queue",
    "MemoryRows": "block_bytes",
    "ModelSpec": ".format.model",
    "OPAQUE": ".format.streams",
    "QueuedJob": "engine_queue",
    "RowPiece": "rows",
    "Scattered": "block_bytes",
    "SessionHandle": "sessions",
    "SessionRows": "rows",
    "SessionWriter": "writer",
    "TOKENS": ".format.streams",
    "connect": "client",
    "document": "convert",
}
"""The module of each name, a `.format` one too; names that are not listed are of `types`."""


def __getattr__(name: str) -> object:
    """Import the module of a public name."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES.get(name, 'types')}", __name__), name)
