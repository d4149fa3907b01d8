"""A storage backend of SGLang's HiCache."""

from typing import TYPE_CHECKING

from ctxcache.engines import lazily

if TYPE_CHECKING:
    from gpu_worker.engines.sglang import CtxcacheHiCache

__all__ = ["CtxcacheHiCache"]

__getattr__ = lazily(
    __name__,
    {
        "gpu_worker.engines.sglang": ("CtxcacheHiCache",),
    },
)
