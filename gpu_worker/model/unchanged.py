"""Whether a model is still what its engine was made with: a flat look each turn, digests if it differs.

A snapshot is taken once, and compared before each turn. It holds whatever the digest of the execution was
read from (modules' attributes, configurations, containers, code, tensors), and what each of these held, by
identity. The comparison is a few loops in C over flat lists, and no call per module.

```
               same
        ┌──────────────┐
        ▼              │
    SNAPSHOT ──── each turn: look ──── differs ────► digests ──── equal ────► a new SNAPSHOT
                                                        │
                                                        └──── differ ────► ModelChanged
```

Knows modules, tensors' version counters and containers, and nothing of the store. Worst case: all weights
are read once, because something changed that no pass depends on. A write through `tensor.data` that keeps
the storage leaves no mark: it is found by values, see `WeightsWatch`. A change while a turn runs is found at
the next one, and before what the turn computed is saved.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import attrgetter, call, is_, itemgetter
from types import CellType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from ctxcache.format.model import ModelSpec
from gpu_worker.errors import ModelChanged
from gpu_worker.model.executed import (
    TENSORS_SCHEME,
    digest_weights,
    filled_cells,
    has_merged_adapters,
    look_into,
    slots_of,
)
from gpu_worker.model.weights import WeightsWatch

_VERSION = attrgetter("_version")
_TABLES = ("_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks")
"""Torch's own tables of a module that a pass depends on."""
_OF_TORCH = frozenset(nn.Module().__dict__) - {"training"}
_CODE = attrgetter("__code__", "__defaults__", "__kwdefaults__")

Get = Callable[[Any], Iterable[object]]
"""Reads what a thing holds. Any: models hold all sorts."""


class Unchanged:
    """A model and the description that is true of it.

    Make it when the model has been described and has run once.
    """

    def __init__(self, model: PreTrainedModel, spec: ModelSpec) -> None:
        """Raises WeightsNotVisible for a model that cannot be described any more."""
        self._model, self._spec = model, spec
        self._snapshot = ModelSnapshot(model)
        self._watch = WeightsWatch(model)

    def check(self) -> None:
        """Raise ModelChanged unless passes compute what they did.

        While nothing has changed, a call costs one or two microseconds for each module and each parameter.
        """
        is_same = self._watch.sample().is_equal()
        if is_same and self._snapshot.is_current():
            return
        now = ModelSnapshot(self._model)
        # Weights are read only where one of them was written to
        # or replaced: gigabytes, beside settings' milliseconds.
        if not is_same or now.weights != self._snapshot.weights or has_merged_adapters(self._model):
            self._compare("weights_digest", self._digest_weights())
        # Something differed that no digest shows (a hook that
        # watches, say): it is accepted, and not looked at again.
        self._compare("settings", now.settings)
        self._snapshot = now
        self._watch.mark()

    def check_weights(self) -> None:
        """Raise ModelChanged unless the weights are those of the last `check`. For any thread."""
        if not self._watch.sample().is_equal():
            self._compare("weights_digest", "changed in memory")

    def _digest_weights(self) -> str:
        if not self._spec.weights_digest.startswith(TENSORS_SCHEME):
            # Files say nothing of weights that were changed in memory.
            return "changed in memory"
        return digest_weights(self._model)

    def _compare(self, field: str, current: str) -> None:
        described = str(getattr(self._spec, field))
        if current != described:
            raise ModelChanged(model=self._spec.model_id, field=field, described=described, found=current)


class ModelSnapshot:
    """Everything of a model that a pass depends on, and what was true of it.

    Holds what it compares by identity: an object that is gone could leave its id to another one. A model
    whose weights were replaced therefore keeps the old ones until the new ones are accepted or the engine
    is closed.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises WeightsNotVisible."""
        self.settings, seen = look_into(model)
        """The digest of the execution that the snapshot is of."""
        # The digest passes over adapters that take no part; their switches count here.
        reached = _Reached([*model.modules(), *seen])
        self._sized, self._lengths = reached.sized, [*map(len, reached.sized)]
        self._getters, self._things = reached.getters, reached.things
        self._held = [*self._contents()]
        tensors = reached.tensors
        # A tensor made in inference mode has no version, and packed weights have no storage: identity has
        # to do.
        self._counted = [tensor for tensor in tensors if not tensor.is_inference()]
        self._placed = [tensor for tensor in tensors if _place(tensor) is not None]
        self._unplaced = [tensor for tensor in tensors if _place(tensor) is None]
        # The changes that each list finds:
        #
        #     lengths    attributes, modules, hooks, entries that were added
        #     held       whatever was replaced or taken out: numbers, methods, modules, tensors, functions
        #     versions   writes in place: torch counts them for each tensor
        #     places     `tensor.data = other`, which leaves the version as it is
        self._versions = [*map(_VERSION, self._counted)]
        self._places = [*map(Tensor.data_ptr, self._placed)]
        self.weights = [_mark(tensor) for tensor in _stored(model)]
        """Which stored tensors there are, where they lie, and how often each was written to."""

    def is_current(self) -> bool:
        """Whether nothing has changed that a pass could depend on, stored weights or other things."""
        try:
            return (
                [*map(len, self._sized)] == self._lengths
                # By identity, not by value: an equal list in the place of another one may change later.
                and all(map(is_, self._contents(), self._held))
                and [*map(_VERSION, self._counted)] == self._versions
                and [*map(Tensor.data_ptr, self._placed)] == self._places
                # A packed weight that has a storage now was replaced in place.
                and not any(map(_place, self._unplaced))
            )
        except (AttributeError, KeyError, RuntimeError, ValueError):
            # An attribute or an entry is gone; or a tensor that had a version or a storage has none any more.
            return False

    def _contents(self) -> Iterator[object]:
        return chain.from_iterable(map(call, self._getters, self._things))


class _Reached:
    """The mutable things that some objects lead to, each once, and how each is read."""

    def __init__(self, objects: Iterable[object]) -> None:
        self.sized: list[Any] = []
        """Things whose number of entries counts."""
        self.getters: list[Get] = []
        self.things: list[Any] = []
        self.tensors: list[Tensor] = []
        self._known: dict[int, object] = {}
        self._by_names: dict[tuple[object, ...], Get] = {}
        waiting = deque(objects)
        while waiting:
            thing = waiting.popleft()
            if id(thing) not in self._known:
                # The thing is kept: its id is its own only as long as it is there.
                self._known[id(thing)] = thing
                waiting.extend(self._add(thing))

    def _add(self, thing: Any) -> Iterable[object]:
        """Read a thing from now on. Returns what it leads to. Any: models hold all sorts."""
        match thing:
            case Tensor():
                self.tensors.append(thing)
                return ()
            case nn.Module():
                return self._module(thing)
            case dict() | list() | set() | deque():
                return self._container(thing)
            case FunctionType():
                return self._function(thing)
            case ModuleType() | type():
                return self._namespace(thing)
        return self._object(thing)

    def _container(self, held: Any) -> Iterable[object]:
        # Any: a container of anything.
        if isinstance(held, dict):
            self._names(held, tuple(held))
            return _containers(held.values())
        self.sized.append(held)
        if held:
            self._read(held, tuple)
        return _containers(held)

    def _function(self, function: FunctionType) -> Iterable[object]:
        self._read(function, _CODE)
        for cell in filled_cells(function):
            self._read(cell, _in_cell)
        return () if function.__kwdefaults__ is None else (function.__kwdefaults__,)

    def _namespace(self, of: ModuleType | type) -> Iterable[object]:
        held = vars(of)
        if isinstance(of, type):
            self._names(held, tuple(held))
        else:
            # Passes call these functions by name. Another name in the module changes no pass.
            functions = tuple(name for name, value in held.items() if _is_function(value))
            self._names(held, functions, is_sized=False)
        return ()

    def _object(self, thing: object) -> Iterable[object]:
        slots = [name for name in slots_of(type(thing)) if hasattr(thing, name)]
        if slots:
            # The first slot twice: see `_names`.
            self._read(thing, attrgetter(*slots, slots[0]))
        return (vars(thing),) if hasattr(thing, "__dict__") else ()

    def _module(self, module: nn.Module) -> Iterable[object]:
        held = module.__dict__
        own = tuple(name for name in held if name not in _OF_TORCH)
        self._names(held, (*own, *_TABLES))
        tables = [held[name] for name in _TABLES]
        tensors = [each for table in tables[1:3] for each in table.values() if each is not None]
        # Which buffers are stored decides what is a weight.
        return (*tables, held["_non_persistent_buffers_set"], *tensors, *_containers(map(held.get, own)))

    def _names(self, held: Any, names: tuple[object, ...], *, is_sized: bool = True) -> None:
        if is_sized:
            self.sized.append(held)
        if names:
            # The first name twice: for one name alone, the getter gives a value without a tuple around it.
            self._read(held, self._by_names.setdefault(names, itemgetter(*names, names[0])))

    def _read(self, thing: Any, get: Get) -> None:
        self.getters.append(get)
        self.things.append(thing)


def _is_function(held: object) -> bool:
    # Compiled functions of torch are of other types than Python's.
    return callable(held) and not isinstance(held, type)


def _containers(values: Iterable[object]) -> Iterator[object]:
    """The values that may change in place."""
    return (value for value in values if isinstance(value, (dict, list, set, deque, PreTrainedConfig)))


def _in_cell(cell: CellType) -> tuple[object]:
    # Raises ValueError for a cell that was emptied.
    return (cell.cell_contents,)


def _stored(model: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers that a checkpoint has, module by module; tables are computed and not stored."""
    for module in model.modules():
        held = module.__dict__
        for name, tensor in (*held["_parameters"].items(), *held["_buffers"].items()):
            if tensor is not None and name not in held["_non_persistent_buffers_set"]:
                yield tensor


def _mark(tensor: Tensor) -> tuple[int, int, int]:
    return id(tensor), _place(tensor) or 0, 0 if tensor.is_inference() else _VERSION(tensor)


def _place(tensor: Tensor) -> int | None:
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return None
