"""Whether a model's weights have changed: a few values of each parameter, read beside its passes.

    mark ──► sample ─ equal ──► what passes computed before the sample is by the marked weights
                 └── differs ──► somebody changed them, and said nothing

Parameters that were replaced, moved or written to in torch's sight are always noticed. Writes that torch
does not count (`tensor.data`, another process) are noticed by RUNS x RUN_VALUES values of each parameter: a
step of an optimiser changes most of them. A step that changes a thousandth of the values of a model with 300
parameters passes unseen once in 10,000 times. Knows modules and tensors, and nothing of engines or of the
store. Cost of a sample: one to two microseconds for each parameter; on a GPU a few kernels, and no wait.
"""

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter

import torch
from torch import Tensor, nn

RUNS, RUN_VALUES = 2, 16
"""Places of each parameter that are looked at, and neighbouring values at each."""
PACKED = ("cpu_linear",)
"""Attributes of vLLM's layers that hold the weights where the parameters are empty."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_VERSION = attrgetter("_version")


class Sample:
    """What a model's weights were at one moment. Thread-safe."""

    def __init__(self, values: Sequence[Tensor], expected: Sequence[Tensor], *, is_replaced: bool) -> None:
        """`values`, and what they should be; `is_replaced`: other tensors are there."""
        self._lock = threading.Lock()
        self._is_equal: bool | None = False if is_replaced else None
        self._expected = expected
        device = next((value.device for value in values), torch.device("cpu"))
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda" and not is_replaced:
            # The copy runs behind what computes now, and without a wait for it.
            values = [
                torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)
                for value in values
            ]
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))
        self._values = values

    @property
    def is_known(self) -> bool:
        """Whether `is_equal` waits for nothing."""
        with self._lock:
            return self._is_equal is not None or self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def is_equal(self) -> bool:
        """Whether the weights were those of the mark. Waits for the device, where it has not come so far."""
        with self._lock:
            if self._is_equal is None:
                if self._event is not None:
                    self._event.synchronize()
                self._is_equal = all(map(torch.equal, self._values, self._expected))
            return self._is_equal


class WeightsWatch:
    """The weights of a model. `mark` and `sample` are for the thread that runs its passes."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.mark()

    @torch.no_grad()
    def mark(self) -> None:
        """Take the present weights as the right ones."""
        modules = [*self._model.modules()]
        held: list[Mapping[str, object]] = [module._parameters for module in modules]  # noqa: SLF001
        self._held = [*held, *(module._modules for module in modules)]  # noqa: SLF001
        self._packed = [
            module.__dict__ for module in modules if any(map(module.__dict__.__contains__, PACKED))
        ]
        # Kept alive: an object that is gone could leave its id to another one.
        self._objects = self._current()
        tensors = [value for value in self._objects if isinstance(value, Tensor) and _place(value)]
        self._placed = tensors
        self._counted = [tensor for tensor in tensors if not tensor.is_inference()]
        self._places = [*map(Tensor.data_ptr, self._placed)]
        self._versions = [*map(_VERSION, self._counted)]
        runs = defaultdict[tuple[torch.device, torch.dtype], list[Tensor]](list)
        for run in chain.from_iterable(map(_runs, tensors)):
            runs[run.device, run.dtype].append(run)
        self._runs = [*runs.values()]
        self._values = [tensor.cpu() for tensor in self._read()]

    @torch.no_grad()
    def sample(self) -> Sample:
        """Sample the weights, behind all passes that were begun."""
        is_replaced = not self._is_same()
        # Views of tensors that were replaced show memory that may be used for something else.
        return Sample(() if is_replaced else self._read(), self._values, is_replaced=is_replaced)

    def _current(self) -> list[object]:
        packed = (one.get(name) for one in self._packed for name in PACKED)
        return [*chain.from_iterable(one.values() for one in self._held), *packed]

    def _is_same(self) -> bool:
        try:
            return (
                [*map(id, self._current())] == [*map(id, self._objects)]
                and [*map(Tensor.data_ptr, self._placed)] == self._places
                and [*map(_VERSION, self._counted)] == self._versions
            )
        except RuntimeError:
            # A tensor that had a storage or a version has none any more.
            return False

    def _read(self) -> list[Tensor]:
        return [*map(torch.cat, self._runs)]


def _runs(tensor: Tensor) -> Iterator[Tensor]:
    """Runs of a tensor's values as they lie in memory, as integers of their size."""
    plain = tensor.detach().as_subclass(Tensor)
    begin = plain.storage_offset()
    count = min(plain.numel(), plain.untyped_storage().nbytes() // plain.element_size() - begin)
    values = torch.as_strided(plain, (count,), (1,), begin).view(_BITS[plain.element_size()])
    size = min(RUN_VALUES, count)
    for first in {(2 * i + 1) * (count - size) // (2 * RUNS): None for i in range(RUNS)}:
        yield values[first : first + size]


def _place(tensor: Tensor) -> int:
    """Where a tensor lies; 0 for one that is empty, or has no memory of its own."""
    try:
        return tensor.data_ptr() if tensor.numel() else 0
    except RuntimeError:
        return 0
