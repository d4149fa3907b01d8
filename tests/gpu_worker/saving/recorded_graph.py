"""A CUDA graph on a CPU: the operations of a pass, again and again on the memory that they had then.

No Python of the pass runs at a replay. What a capture forbids, to wait for the device or to copy to another
one, is refused here as well.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WAITS = ("_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero")


class RecordedGraph(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, operations are recorded; `replay` does them again."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], object]] = []

    # Any: torch hands over whatever an operation takes.
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See TorchDispatchMode."""
        name = func.overloadpacket.__name__
        if name in _WAITS:
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        found = func(*args, **(kwargs or {}))
        self._calls.append((func, args, kwargs or {}, found))
        return found

    @property
    def names(self) -> list[str]:
        """Names of the recorded calls, in order."""
        return [func.overloadpacket.__name__ for func, *_ in self._calls]

    def replay(self) -> None:
        """Do it all again, each result where the first one lies."""
        with torch.no_grad():
            for func, args, kwargs, found in self._calls:
                for old, new in zip(tree_leaves(found), tree_leaves(func(*args, **kwargs)), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)
