"""The small trace of the simulator's tests."""

from tests.simulate.conftest import trace_path

__all__ = ["trace_path"]
