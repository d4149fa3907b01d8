"""The client: what an engine needs to keep sessions in a server and to restore them."""

from ctxcache.client.client import Client, connect
from ctxcache.client.decode_batch import DecodeBatch
from ctxcache.client.engine_queue import EngineQueue, QueuedJob
from ctxcache.client.models import CallerModel
from ctxcache.client.rows import RowPiece, SessionRows
from ctxcache.client.sessions import SessionHandle
from ctxcache.client.types import (
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

__all__ = [
    "CallerModel",
    "Client",
    "DecodeBatch",
    "Durability",
    "EngineQueue",
    "QueuedJob",
    "RowPiece",
    "SessionHandle",
    "SessionInfo",
    "SessionRows",
    "SessionWriter",
    "connect",
    "days",
    "hidden",
    "hours",
    "kv",
    "latent",
    "minutes",
    "seconds",
]
