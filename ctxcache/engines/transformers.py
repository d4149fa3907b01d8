"""transformers in this process, restored from the store. Needs the extra `worker`."""

from typing import TYPE_CHECKING

from ctxcache.engines import lazily

if TYPE_CHECKING:
    from gpu_worker.engines.ahead import Ahead
    from gpu_worker.engines.next_prompts import next_history
    from gpu_worker.engines.transformers import TransformersEngine
    from gpu_worker.engines.transformers_batch import TransformersBatchEngine, TurnRequest
    from gpu_worker.engines.transformers_chat import Chat, ChatTurn
    from gpu_worker.engines.transformers_host import HostCache
    from gpu_worker.engines.transformers_turns import Rerendered, Turn
    from gpu_worker.model.proof import adapt
    from gpu_worker.model.spec import model_spec, spec_from_directory
    from gpu_worker.planning.plan import Method, RestorePlan

__all__ = [
    "Ahead",
    "Chat",
    "ChatTurn",
    "HostCache",
    "Method",
    "Rerendered",
    "RestorePlan",
    "TransformersBatchEngine",
    "TransformersEngine",
    "Turn",
    "TurnRequest",
    "adapt",
    "model_spec",
    "next_history",
    "spec_from_directory",
]

__getattr__ = lazily(
    __name__,
    {
        "gpu_worker.engines.ahead": ("Ahead",),
        "gpu_worker.engines.next_prompts": ("next_history",),
        "gpu_worker.engines.transformers": ("TransformersEngine",),
        "gpu_worker.engines.transformers_turns": ("Rerendered", "Turn"),
        "gpu_worker.engines.transformers_batch": ("TransformersBatchEngine", "TurnRequest"),
        "gpu_worker.engines.transformers_chat": ("Chat", "ChatTurn"),
        "gpu_worker.engines.transformers_host": ("HostCache",),
        "gpu_worker.model.proof": ("adapt",),
        "gpu_worker.model.spec": ("model_spec", "spec_from_directory"),
        "gpu_worker.planning.plan": ("Method", "RestorePlan"),
    },
)
