"""The versions of engines that were run with ctxcache, and what a start says of others.

`make engines-versions` runs each, and writes into the engine's page which tests passed. This module imports
no engine. Worst case: a version that nobody ran has changed what an adapter uses. It starts with a warning.
"""

import functools
import logging
import re

log = logging.getLogger(__name__)

TRIED: dict[str, tuple[str, ...]] = {
    "vLLM": ("0.26", "0.28", "0.30", "0.31", "0.32"),
    "LMCache": ("0.5.4", "0.5.5", "0.5.6"),
    "SGLang": ("0.5.21", "0.5.22", "0.5.23"),
    "xllamacpp": ("2026.10.11549",),
}
"""By engine, oldest first. `0.32` means every 0.32.x."""


def numbers_of(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (0, 28, 0) of `0.28.0+cpu`; empty for a build that has none."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def is_tried(engine: str, version: str) -> bool:
    """Whether a version is one of those that were run."""
    numbers = numbers_of(version)
    return any(numbers[: len(tried)] == tried for tried in map(numbers_of, TRIED[engine]))


@functools.cache
def warn_if_untried(engine: str, version: str) -> None:
    """Warn once of a version that was not run."""
    if not is_tried(engine, version):
        tried = ", ".join(TRIED[engine])
        log.warning(
            "%s %s was not tried with ctxcache, %s were: compare replies first", engine, version, tried
        )
