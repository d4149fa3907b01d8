"""vLLM's connectors, and what registers them in vLLM's processes."""

from typing import TYPE_CHECKING

from ctxcache.engines import lazily

if TYPE_CHECKING:
    from gpu_worker.engines.vllm.ahead import AheadMiddleware
    from gpu_worker.engines.vllm.connector import CtxcacheConnector
    from gpu_worker.engines.vllm.offloading import CtxcacheOffloadingConnector
    from gpu_worker.engines.vllm.plugin import register

__all__ = ["AheadMiddleware", "CtxcacheConnector", "CtxcacheOffloadingConnector", "register"]

__getattr__ = lazily(
    __name__,
    {
        "gpu_worker.engines.vllm.ahead": ("AheadMiddleware",),
        "gpu_worker.engines.vllm.connector": ("CtxcacheConnector",),
        "gpu_worker.engines.vllm.offloading": ("CtxcacheOffloadingConnector",),
        "gpu_worker.engines.vllm.plugin": ("register",),
    },
)
