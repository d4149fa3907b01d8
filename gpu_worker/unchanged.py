"""Whether a model still is what its engine was made with: a cheap mark before each turn, digests when the mark differs.

Knows modules, tensors' version counters and peft's adapters, and nothing of the store. Worst case: all weights are read
once, because something changed that no pass depends on. What writes through `tensor.data` leaves no mark, and a change
while a turn runs is found at the next one.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ctxcache.format.model import ModelSpec
from gpu_worker.errors import ModelChanged
from gpu_worker.executed import TENSORS_SCHEME, digest_execution, digest_weights, has_merged_adapters

Mark = tuple[object, ...]


class Unchanged:
    """A model and the description that is true of it. Make it when the model has been described and has run once."""

    def __init__(self, model: PreTrainedModel, spec: ModelSpec) -> None:
        self._model, self._spec = model, spec
        self._settings, self._weights = _settings(model), _weights(model)

    def check(self) -> None:
        """Raise ModelChanged unless passes compute what they did. Costs microseconds per module while nothing changed."""
        settings, weights = _settings(self._model), _weights(self._model)
        if (settings, weights) == (self._settings, self._weights):
            return
        if weights != self._weights or has_merged_adapters(self._model):
            self._compare("weights_digest", self._digest_weights())
        self._compare("settings", digest_execution(self._model))
        self._settings, self._weights = settings, weights

    def _digest_weights(self) -> str:
        if not self._spec.weights_digest.startswith(TENSORS_SCHEME):
            # Files say nothing of weights that were changed in memory.
            return "changed in memory"
        return digest_weights(self._model)

    def _compare(self, field: str, found: str) -> None:
        described = str(getattr(self._spec, field))
        if found != described:
            raise ModelChanged(model=self._spec.model_id, field=field, described=described, found=found)


def _settings(model: nn.Module) -> Mark:
    """What modules there are, how they are switched, and what they have computed beforehand."""
    return tuple(each for module in model.modules() for each in (*_switches(module), *_tables(module)))


def _switches(module: Any) -> Iterator[object]:
    # Any: peft may not be there to name the type of a layer with adapters.
    facts = module.__dict__
    yield id(module)
    yield module.training
    yield id(facts.get("forward"))
    yield (*facts["_forward_hooks"], *facts["_forward_pre_hooks"])
    if "_disable_adapters" in facts:
        yield module.disable_adapters
        yield tuple(module.merged_adapters)
        yield tuple(module.active_adapters)
        yield tuple(sorted(module.scaling.items())) if hasattr(module, "scaling") else ()


def _weights(model: nn.Module) -> Mark:
    """Which tensors there are, where they lie, and how often each was written to."""
    return tuple(each for module in model.modules() for each in _stored(module))


def _stored(module: nn.Module) -> Iterator[object]:
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):  # noqa: SLF001  each by each name
        if tensor is not None and name not in module._non_persistent_buffers_set:  # noqa: SLF001  as above
            yield _mark(tensor)


def _tables(module: nn.Module) -> Iterator[object]:
    for name in module._non_persistent_buffers_set:  # noqa: SLF001  as above
        tensor = module._buffers.get(name)  # noqa: SLF001  as above
        if tensor is not None:
            yield _mark(tensor)


def _mark(tensor: Tensor) -> Mark:
    return id(tensor), _place(tensor), _version(tensor)


def _place(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr()
    except RuntimeError:
        # Packed weights have no storage of their own; their identity has to do.
        return 0


def _version(tensor: Tensor) -> int:
    # Made in inference mode, tensors are not counted.
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001  torch has no other way to ask
