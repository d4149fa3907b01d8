"""LMCache's second tier, for its server, and its remote storage, inside an engine."""

from typing import TYPE_CHECKING

from ctxcache.engines import lazily

if TYPE_CHECKING:
    from gpu_worker.engines.lmcache.l2 import CtxcacheL2
    from gpu_worker.engines.lmcache.remote import CtxcacheRemote

__all__ = ["CtxcacheL2", "CtxcacheRemote"]

__getattr__ = lazily(
    __name__,
    {
        "gpu_worker.engines.lmcache.l2": ("CtxcacheL2",),
        "gpu_worker.engines.lmcache.remote": ("CtxcacheRemote",),
    },
)
