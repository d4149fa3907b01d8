"""ctxcache: a context cache for LLM inference. Importing this package imports neither torch nor grpc."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ctxcache.client.client import connect

__version__ = "0.1.0"
__all__ = ["__version__", "connect"]


def __getattr__(name: str) -> object:
    """Import the client when `connect` is first used: the store and most verbs never do."""
    if name != "connect":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("ctxcache.client.client").connect
