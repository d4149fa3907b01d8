"""Whether a model is still what its engine was made with: a flat look each turn, digests if it differs.

A snapshot is taken once, and compared before each turn. The comparison reads lists that the snapshot
collected, so that its cost is a few loops in C and no call per module.

```
               same
        ┌──────────────┐
        ▼              │
    SNAPSHOT ──── each turn: look ──── differs ────► digests ──── equal ────► a new SNAPSHOT
                                                        │
                                                        └──── differ ────► ModelChanged
```

Knows modules, tensors' version counters and peft's adapters, and nothing of the store. Worst case: all
weights are read once, because something changed that no pass depends on. A write through `tensor.data` that
keeps the storage leaves no mark, and a change while a turn runs is found at the next one.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from operator import attrgetter, itemgetter, methodcaller
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ctxcache.format.model import ModelSpec
from gpu_worker.errors import ModelChanged
from gpu_worker.executed import TENSORS_SCHEME, digest_execution, digest_weights, has_merged_adapters

# Getters of `operator` run in C, and `map` over them makes no frame of Python for each module.
_FACTS = attrgetter("__dict__")
_CHILDREN, _TRAINING = itemgetter("_modules"), itemgetter("training")
_PARAMETERS, _BUFFERS = itemgetter("_parameters"), itemgetter("_buffers")
_TABLE_NAMES = itemgetter("_non_persistent_buffers_set")
_HOOKS, _PRE_HOOKS = itemgetter("_forward_hooks"), itemgetter("_forward_pre_hooks")
_METHOD = methodcaller("get", "forward")
_OFF = methodcaller("get", "_disable_adapters")
_VALUES = methodcaller("values")
_VERSION = attrgetter("_version")

Facts = Mapping[str, Any]
"""The attributes of a module, `module.__dict__`. Any: torch and peft keep all sorts in it."""


class Unchanged:
    """A model and the description that is true of it.

    Make it when the model has been described and has run once.
    """

    def __init__(self, model: PreTrainedModel, spec: ModelSpec) -> None:
        self._model, self._spec = model, spec
        self._snapshot = ModelSnapshot(model)

    def check(self) -> None:
        """Raise ModelChanged unless passes compute what they did.

        While nothing has changed, a call costs about a microsecond for each module.
        """
        if self._snapshot.is_current():
            return
        now = ModelSnapshot(self._model)
        # Weights are read only where one of them was written to
        # or replaced: gigabytes, beside settings' milliseconds.
        if now.weights != self._snapshot.weights or has_merged_adapters(self._model):
            self._compare("weights_digest", self._digest_weights())
        # Something differed that no digest shows (a hook that
        # watches, say): it is accepted, and not looked at again.
        self._compare("settings", digest_execution(self._model))
        self._snapshot = now

    def _digest_weights(self) -> str:
        if not self._spec.weights_digest.startswith(TENSORS_SCHEME):
            # Files say nothing of weights that were changed in memory.
            return "changed in memory"
        return digest_weights(self._model)

    def _compare(self, field: str, found: str) -> None:
        described = str(getattr(self._spec, field))
        if found != described:
            raise ModelChanged(model=self._spec.model_id, field=field, described=described, found=found)


class ModelSnapshot:
    """All modules and tensors of a model, and what was true of them.

    Holds what it compares by identity: an object that is gone could leave its id to another one. A model
    whose weights were replaced therefore keeps the old ones until the new ones are accepted or the engine
    is closed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = tuple(model.modules())
        facts = [*map(_FACTS, self._modules)]
        self._table_names = [*map(set, map(_TABLE_NAMES, facts))]
        # Kept alive: switches are compared by `id`, which a freed function would leave to another one.
        self._methods = [*map(_METHOD, facts)]
        self._structure = _structure(facts)
        self._switches = _switches(facts)
        self._adapters = _adapters(self._modules, facts)
        self._tensors = tuple(tensor for tensor in _tensors(facts) if tensor is not None)
        # A tensor made in inference mode has no version, and packed weights have no storage: identity has
        # to do.
        self._counted = tuple(tensor for tensor in self._tensors if not tensor.is_inference())
        self._placed = tuple(tensor for tensor in self._tensors if _place(tensor) is not None)
        self._unplaced = tuple(tensor for tensor in self._tensors if _place(tensor) is None)
        # The changes that each list finds:
        #
        #     structure   modules and tensors that were replaced, added or taken out
        #     versions    writes in place: torch counts them for each tensor
        #     places      `tensor.data = other`, which leaves the version as it is
        #     switches    train or eval, methods put in, hooks
        #     adapters    active, merged, disabled, scaled
        self._versions = [*map(_VERSION, self._counted)]
        self._places = [*map(Tensor.data_ptr, self._placed)]
        self.weights = [_mark(tensor) for tensor in _stored(facts)]
        """Which stored tensors there are, where they lie, and how often each was written to."""

    def is_current(self) -> bool:
        """Whether nothing has changed that a pass could depend on, stored weights or other things."""
        facts = [*map(_FACTS, self._modules)]
        try:
            return (
                _structure(facts) == self._structure
                and _switches(facts) == self._switches
                and [*map(_TABLE_NAMES, facts)] == self._table_names
                and _adapters(self._modules, facts) == self._adapters
                # The same tensors as then, by the structure: they need not be looked up again.
                and [*map(_VERSION, self._counted)] == self._versions
                and [*map(Tensor.data_ptr, self._placed)] == self._places
                # A packed weight that has a storage now was replaced in place.
                and not any(map(_place, self._unplaced))
            )
        except RuntimeError:
            # A tensor that had a version or a storage has none any more.
            return False


def _structure(facts: list[Facts]) -> list[int]:
    """The modules below each module, and the tensors that each has by its names."""
    held = chain(map(_CHILDREN, facts), map(_PARAMETERS, facts), map(_BUFFERS, facts))
    return [*map(id, chain.from_iterable(map(_VALUES, held)))]


def _switches(facts: list[Facts]) -> tuple[list[bool], list[int], list[tuple[int, ...]]]:
    """How modules are switched, and the methods and hooks that were put in."""
    return (
        [*map(_TRAINING, facts)],
        [*map(id, map(_METHOD, facts))],
        # A hook's key is a number that no other hook has had.
        [*map(tuple, chain(map(_HOOKS, facts), map(_PRE_HOOKS, facts)))],
    )


def _adapters(modules: Iterable[nn.Module], facts: list[Facts]) -> list[object]:
    """How the layers with adapters are switched. peft may not be there to name their type."""
    switched: list[Any] = [
        module for module, off in zip(modules, map(_OFF, facts), strict=True) if off is not None
    ]
    return [
        (
            module.disable_adapters,
            tuple(module.merged_adapters),
            tuple(module.active_adapters),
            tuple(sorted(module.scaling.items())) if hasattr(module, "scaling") else (),
        )
        for module in switched
    ]


def _tensors(facts: list[Facts]) -> Iterator[Tensor | None]:
    return chain.from_iterable(map(_VALUES, chain(map(_PARAMETERS, facts), map(_BUFFERS, facts))))


def _stored(facts: list[Facts]) -> Iterator[Tensor]:
    """Parameters and buffers that a checkpoint has, module by module; tables are computed and not stored."""
    for each in facts:
        for name, tensor in (*each["_parameters"].items(), *each["_buffers"].items()):
            if tensor is not None and name not in each["_non_persistent_buffers_set"]:
                yield tensor


def _mark(tensor: Tensor) -> tuple[int, int, int]:
    return id(tensor), _place(tensor) or 0, 0 if tensor.is_inference() else _VERSION(tensor)


def _place(tensor: Tensor) -> int | None:
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return None
