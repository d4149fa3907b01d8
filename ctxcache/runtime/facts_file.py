"""A small file of facts: JSON with a checksum of its own, replaced as a whole.

Knows no meaning of the facts. Worst case: a crash at any point leaves the file as it was or as it was
to be; a flipped bit is a CorruptMetadata, never another fact.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_hexdigest

from ctxcache.errors import CorruptMetadata
from ctxcache.runtime.privacy import open_private

CHECKSUM = "checksum"


def write_facts(path: Path, facts: Mapping[str, object]) -> None:
    """Write the file and sync it. Raises OSError."""
    # Synced before it gets its name, and the name before anything relies on it.
    partial = path.with_name(f"{path.name}.partial")
    fd = open_private(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        json.dump({**facts, CHECKSUM: _checksum(facts)}, file)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    sync_directory(path.parent)


def read_facts(path: Path, *, is_checksum_needed: bool = True) -> dict[str, Any]:
    """Read the facts back. Raises CorruptMetadata, FileNotFoundError and other OSError."""
    try:
        facts = json.loads(path.read_bytes())
        found = facts.pop(CHECKSUM, None)
    except (ValueError, AttributeError, TypeError) as error:
        raise CorruptMetadata(where=str(path), problem=f"it does not parse: {error!r}") from error
    if found != _checksum(facts) and (found is not None or is_checksum_needed):
        raise CorruptMetadata(where=str(path), problem="its checksum does not match")
    return dict(facts)


def sync_directory(path: Path) -> None:
    """Make a directory's entries durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _checksum(facts: Mapping[str, object]) -> str:
    return xxh3_64_hexdigest(json.dumps(facts, sort_keys=True).encode())
