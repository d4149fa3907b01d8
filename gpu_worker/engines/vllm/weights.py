"""The version by which the store knows an engine's loaded weights, or that they have none.

vLLM lets weights be changed in place: `reload_weights`, weight transfer, sleep, or any function that a caller
runs in its workers. State of other weights must be neither restored nor saved under the old name.

    files ── reset_cache ──► epoch-9c1b…   vLLM's own caches are empty: what comes is of one model again
      │           └──► step-100            where vLLM was told a version (`weight_version`) since the last one
      │
      └── noticed, or vLLM's caches are not empty ──► no name: nothing is restored or saved until a reset
"""

import gc
import logging
import uuid
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm.v1.engine.core import EngineCore

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = logging.getLogger(__name__)

FILES = ""
"""The version of weights that are as the model's files have them."""
RESET = "reset_prefix_cache(reset_connector=True)"


def first_version(config: "VllmConfig", given: str) -> str | None:
    """The version of the weights with which an engine starts; None where they are not those of its files."""
    if given:
        return given
    return None if str(config.load_config.load_format) == "dummy" else FILES


# Owned by vLLM's scheduler thread. `renewed` ends what goes on under the old version: requests in flight have
# state of both.
class WeightsName:
    """The version of the loaded weights, as the scheduler's side of a connector knows it."""

    def __init__(self, config: "VllmConfig", given: str, renewed: Callable[[], None]) -> None:
        """`renewed` is called when the version has become another one."""
        self.version = first_version(config, given)
        """None: they have no name, and nothing is restored or saved."""
        self._renewed = renewed
        self._engine = _engine_being_made()
        self._told = self._told_last = self._told_now()
        """vLLM's own version of the weights: when they got their name, and at the last look."""
        self._is_empty = True
        """Whether nothing was computed since vLLM's own caches were empty."""
        if self.version is None:
            log.warning(
                "the weights are not those of the model's files: nothing is restored or saved until %s", RESET
            )

    def reset(self, *, is_empty: bool) -> None:
        """The weights have changed, or will before the next pass. `is_empty`: vLLM's own caches are empty."""
        self._is_empty = is_empty
        self._told_last = self._told_now()
        if not is_empty:
            self._take_away("vLLM's own cache still has what the old weights computed")
            return
        # The name is unique: no other engine and no later process finds what this engine saves.
        self._give(self._told_last if self._told_last != self._told else f"epoch-{uuid.uuid4().hex}")

    def changed(self, version: str) -> None:
        """A worker noticed that weights of this version are not loaded any more."""
        if version == self.version:
            self._take_away("the weights were changed, and nobody said so")

    def look(self) -> None:
        """See whether vLLM was told another version of the weights."""
        told = self._told_now()
        if told == self._told_last:
            return
        self._told_last = told
        if self._is_empty:
            self._give(told)
        else:
            self._take_away(f"the weights are version {told!r} by now")

    def computed(self) -> None:
        """A step computes something."""
        self._is_empty = False

    def _give(self, version: str) -> None:
        self.version, self._told = version, self._told_last
        log.info("the weights are version %s in the context store", version)
        self._renewed()

    def _take_away(self, problem: str) -> None:
        if self.version is None:
            return
        self.version = None
        log.error("%s: nothing is restored or saved until %s", problem, RESET)
        self._renewed()

    def _told_now(self) -> str:
        engine = self._engine()
        return str(getattr(engine, "_weight_version", ""))


def _engine_being_made() -> "Callable[[], EngineCore | None]":
    """The engine that makes its connector now: vLLM tells a connector neither the engine nor its version."""
    # Ask for the type, not by `isinstance`: some objects do work of their own to answer that.
    engines = [one for one in gc.get_objects() if issubclass(type(one), EngineCore)]
    made = [one for one in engines if "scheduler" not in vars(one)]
    return weakref.ref(made[-1]) if made else lambda: None
