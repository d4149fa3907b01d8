"""What a catalog says, read from its files; and the format of what is in them.

    entry        key bytes u32 | value bytes u32, 2^32-1 for a deletion | sequence u64 | key | value
                 | XXH3-64 of all before it, seeded with XXH3-64 of the store's id, u64
    begin mark   an entry without a key, its value one zero byte: what follows comes after that commit
    commit mark  the deletion of an entry without a key: all of that commit is before it
    end mark     an entry without key and value: the base is whole, or the run ended in order

Keys and values are those of `records.py`. The newest base that is whole counts, and the logs from its
number on, each up to where the next one begins. A commit counts with its mark or not at all; where
earlier versions wrote, without marks, each of its entries does. Worst case: a file is damaged or
commits are missing, which is said of what was read, and what can be read counts.
"""

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from xxhash import xxh3_64_intdigest

_HEAD = struct.Struct("<IIQ")
_CHECKSUM = struct.Struct("<Q")
_DELETED = (1 << 32) - 1
Entry = tuple[bytes, bytes | None]
"""A record's key, and its value or None: it is deleted."""
BEGIN, COMMIT, END = b"\0", None, b""
MARK_BYTES = _HEAD.size + _CHECKSUM.size
"""Size of a commit or end mark, and the least one of an entry."""


@dataclass(slots=True)
class CatalogContents:
    """What a catalog says: records by key, as of commit `sequence`, and what could not be read of it."""

    records: dict[bytes, bytes] = field(default_factory=dict)
    sequence: int = 0
    problems: list[str] = field(default_factory=list)

    def apply(self, entries: Iterable[Entry], sequence: int) -> None:
        """Take a commit over."""
        for key, value in entries:
            if value is None:
                self.records.pop(key, None)
            else:
                self.records[key] = value
        self.sequence = sequence

    def go_on(self, path: Path, sequence: int) -> None:
        """What follows comes after that commit, which is the last one unless some are missing."""
        if sequence > self.sequence:
            self.problems.append(f"{path}: commits {self.sequence + 1} to {sequence} are missing before it")
            self.sequence = sequence


def read_catalog(directory: str | Path, instance_id: str) -> CatalogContents:
    """Read a catalog that nobody writes. Raises OSError when a file cannot be read."""
    directory, seed = Path(directory), xxh3_64_intdigest(instance_id.encode())
    contents = CatalogContents()
    first = _newest_base(directory, seed, contents) if directory.is_dir() else None
    if first is None:
        contents.problems.append(f"{directory} has no base that is whole")
    logs = {n: directory / f"{n:08d}.log" for n in sorted(numbers(directory, "log")) if n >= (first or 0)}
    begins = {number: _begin(path, seed) for number, path in logs.items()}
    if first is not None:
        _join(directory, contents, first, begins)
    for number, path in logs.items():
        later = [begin for n, begin in begins.items() if n > number and begin is not None]
        _replay(path, seed, contents, until=min(later, default=None))
    return contents


def pack(seed: int, sequence: int, key: bytes, value: bytes | None) -> bytes:
    """An entry as it is written."""
    value_bytes = _DELETED if value is None else len(value)
    body = _HEAD.pack(len(key), value_bytes, sequence) + key + (value or b"")
    return body + _CHECKSUM.pack(xxh3_64_intdigest(body, seed=seed))


def pack_mark(seed: int, sequence: int, kind: bytes | None) -> bytes:
    """A mark as it is written: BEGIN, COMMIT or END."""
    return pack(seed, sequence, b"", kind)


def numbers(directory: Path, kind: str) -> Iterable[int]:
    """Which bases or logs are there. Nothing where there is no directory."""
    return [int(path.stem) for path in directory.glob(f"*.{kind}") if path.stem.isdigit()]


def _newest_base(directory: Path, seed: int, contents: CatalogContents) -> int | None:
    for number in sorted(numbers(directory, "base"), reverse=True):
        found = CatalogContents()
        if _replay(directory / f"{number:08d}.base", seed, found):
            contents.records, contents.sequence = found.records, found.sequence
            return number
        contents.problems += found.problems
    return None


def _join(directory: Path, contents: CatalogContents, first: int, begins: Mapping[int, int | None]) -> None:
    """See whether the logs follow on the base. Its own was begun with it, so nothing is between them."""
    if first not in begins:
        contents.problems.append(f"{directory / f'{first:08d}.log'} is gone")
    for number, begin in begins.items():
        if begin is not None and number == first:
            contents.sequence = max(contents.sequence, begin)
        elif begin is not None and begin < contents.sequence:
            # A power cut took back what the base already had.
            contents.problems.append(
                f"{directory / f'{number:08d}.log'} follows commit {begin}, and its base has commits"
                f" {begin + 1} to {contents.sequence} of before a power cut"
            )


def _begin(path: Path, seed: int) -> int | None:
    """The commit that a log follows; None where none is said."""
    with path.open("rb") as file:
        found = _unpack(seed, memoryview(file.read(MARK_BYTES + len(BEGIN))), 0)
    return found[1] if found and found[0] == (b"", BEGIN) else None


def _replay(path: Path, seed: int, contents: CatalogContents, *, until: int | None = None) -> bool:
    """Apply a file's commits, none after `until`; False unless an end mark is the last of its entries."""
    data = memoryview(path.read_bytes())
    offset, is_ended = 0, False
    pending: list[Entry] | None = None
    while offset < len(data):
        found = _unpack(seed, data, offset)
        if found is None:
            contents.problems.append(
                f"{path}: {len(data) - offset} bytes from byte {offset} on are damaged or torn"
            )
            return False
        (key, value), sequence, offset = found
        if until is not None and sequence > until:
            return False
        is_ended = not key and value == END
        if key and pending is not None:
            pending.append((key, value))
        elif key:
            contents.apply([(key, value)], sequence)
        elif value == BEGIN:
            contents.go_on(path, sequence)
            pending = []
        elif value is COMMIT:
            contents.go_on(path, sequence - 1)
            contents.apply(pending or (), sequence)
            pending = []
        else:
            contents.sequence = sequence
    if pending:
        contents.problems.append(f"{path}: its last commit is not whole")
    return is_ended


def _unpack(seed: int, data: memoryview, offset: int) -> tuple[Entry, int, int] | None:
    """An entry, its sequence, and where the next one begins; None when it is not whole."""
    if offset + MARK_BYTES > len(data):
        return None
    key_bytes, value_bytes, sequence = _HEAD.unpack_from(data, offset)
    key_end = offset + _HEAD.size + key_bytes
    value_end = key_end + (0 if value_bytes == _DELETED else value_bytes)
    if value_end + _CHECKSUM.size > len(data):
        return None
    if xxh3_64_intdigest(data[offset:value_end], seed=seed) != _CHECKSUM.unpack_from(data, value_end)[0]:
        return None
    key = bytes(data[offset + _HEAD.size : key_end])
    value = None if value_bytes == _DELETED else bytes(data[key_end:value_end])
    return (key, value), sequence, value_end + _CHECKSUM.size
