"""Whether the names that users import of an engine are its adapters' own, in the engine's environment."""

import importlib


def check_names(engine: str) -> None:
    """Compare each of `ctxcache.engines.{engine}` with the object of that name in `gpu_worker`."""
    module = importlib.import_module(f"ctxcache.engines.{engine}")
    assert module.__all__
    for name in module.__all__:
        found = getattr(module, name)
        assert found.__module__.startswith("gpu_worker."), name
        assert getattr(importlib.import_module(found.__module__), name) is found
