"""The names by which users import adapters of engines: `ctxcache.engines.transformers`, `vllm` and others.

What is behind them lies in `gpu_worker`, whose modules move, and is imported when a name is first used: this
package itself needs no engine and no torch. Worst case: the engine is not installed, and the first use of a
name raises its ModuleNotFoundError.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence


def lazily(module: str, names: Mapping[str, Sequence[str]]) -> Callable[[str], object]:
    """A module's `__getattr__`, by which each name is that of a module of `names`."""
    homes = {name: home for home, some in names.items() for name in some}

    def get(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return get
