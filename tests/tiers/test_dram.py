"""The arena: shared, wholly allocated, and gone when it is closed."""

import mmap
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tier_contract import buffer

from ctxcache.errors import CapacityExceeded, InvalidConfiguration, TierFailure
from ctxcache.format.layout import ALIGN_BYTES, Slot
from ctxcache.storage.tiers.dram import DramArena, remove_abandoned
from ctxcache.storage.tiers.shared_memory import HugePages

SIZE_BYTES = 8 << 20
SOON_S = 30.0
SLOT = Slot(0, ALIGN_BYTES, ALIGN_BYTES)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Name the arena's file."""
    return tmp_path / "arena"


@pytest.fixture
def arena(path: Path) -> Iterator[DramArena]:
    """Give a fresh arena of 8 MiB."""
    arena = DramArena(path, SIZE_BYTES)
    yield arena
    arena.close()


def test_the_file_begins_with_the_arena_id(arena: DramArena, path: Path) -> None:
    """A client that maps the file can tell that it is this arena."""
    assert path.read_bytes()[:16] == arena.arena_id


def test_two_arenas_have_two_ids(arena: DramArena, path: Path) -> None:
    """An arena made anew in the same place is another one."""
    again = DramArena(path, SIZE_BYTES)
    again.close()

    assert again.arena_id != arena.arena_id


def test_all_memory_is_allocated_for_this_user_alone(arena: DramArena, path: Path) -> None:
    """A first touch can neither fail nor be seen by others."""
    facts = path.stat()

    assert facts.st_blocks * 512 >= SIZE_BYTES
    assert facts.st_mode & 0o777 == 0o600


async def test_a_view_is_what_others_map(arena: DramArena, path: Path) -> None:
    """Bytes written to a view, or by write, are at the slot's offset of the shared file."""
    view = arena.view(SLOT)
    view[:5] = b"hello"
    await arena.write(Slot(0, 2 * ALIGN_BYTES, ALIGN_BYTES), 0, buffer(ALIGN_BYTES, seed=9))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as shared:
        mapped = shared[ALIGN_BYTES : 3 * ALIGN_BYTES]

    assert view.nbytes == ALIGN_BYTES
    assert mapped[:5] == b"hello"
    assert mapped[ALIGN_BYTES:] == buffer(ALIGN_BYTES, seed=9)


def test_the_first_page_has_no_view(arena: DramArena) -> None:
    """The arena's own page cannot be overwritten as a slot."""
    with pytest.raises(ValueError, match="not in"):
        arena.view(Slot(0, 0, ALIGN_BYTES))


def test_a_stale_file_is_replaced(path: Path) -> None:
    """The file that a killed server left is gone: a new arena is all zeros."""
    path.write_bytes(b"stale" * SIZE_BYTES)
    arena = DramArena(path, SIZE_BYTES)

    assert path.stat().st_size == SIZE_BYTES
    assert bytes(arena.view(SLOT)) == bytes(ALIGN_BYTES)
    arena.close()


def test_a_symbolic_link_is_refused(path: Path, tmp_path: Path) -> None:
    """No user can have the arena replace, or write to, a file of their choice."""
    (tmp_path / "victim").write_text("mine")
    path.symlink_to(tmp_path / "victim")
    with pytest.raises(TierFailure, match="not a file"):
        DramArena(path, SIZE_BYTES)

    assert (tmp_path / "victim").read_text() == "mine"


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    """An arena that cannot be created says where."""
    with pytest.raises(TierFailure, match="nowhere"):
        DramArena(tmp_path / "nowhere" / "arena", SIZE_BYTES)


@pytest.mark.parametrize("size_bytes", [0, ALIGN_BYTES, 2 * ALIGN_BYTES + 1])
def test_an_odd_size_is_refused(path: Path, size_bytes: int) -> None:
    """An arena is whole pages, its own and at least one more; the refusal names the setting and the least."""
    with pytest.raises(InvalidConfiguration, match=r"arena_size_bytes: .* B; at least 8192 B"):
        DramArena(path, size_bytes)


def test_too_little_memory_is_refused_at_the_start(path: Path) -> None:
    """No memory is an error at creation, with what is needed and what is there, and leaves no file."""
    shared_memory = Path("/dev/shm")  # noqa: S108  the filesystem that arenas are on
    path = shared_memory / f"ctxcache-test-{path.parent.name}"
    needed_bytes = (shutil.disk_usage(shared_memory).total // ALIGN_BYTES + 1) * ALIGN_BYTES
    with pytest.raises(CapacityExceeded, match=str(path)) as caught:
        DramArena(path, needed_bytes)

    assert caught.value.needed_bytes == needed_bytes
    assert int(caught.value.free_bytes) < needed_bytes
    assert not path.exists()


def test_prefaulting_changes_no_bytes(arena: DramArena) -> None:
    """Mapping pages ahead of use leaves what is in them."""
    arena.view(SLOT)[:5] = b"hello"
    prefault = arena.prefault()
    prefault.wait(SOON_S)

    assert prefault.is_complete
    assert arena.prefaulted_bytes == SIZE_BYTES
    assert bytes(arena.view(SLOT)[:5]) == b"hello"


def test_prefaulting_ends_with_the_arena(path: Path) -> None:
    """An arena may be closed at any time; nothing touches its memory afterwards."""
    for _ in range(5):
        arena = DramArena(path, 64 << 20)
        prefault = arena.prefault()
        arena.close()

        prefault.wait(SOON_S)
        assert prefault.populated_bytes <= prefault.size_bytes


def test_prefaulted_memory_is_mapped(arena: DramArena) -> None:
    """Pages that were touched ahead of use cost no fault when they are written."""
    arena.prefault().wait(SOON_S)
    view = arena.view(Slot(0, ALIGN_BYTES, SIZE_BYTES - ALIGN_BYTES))
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    view[::ALIGN_BYTES] = bytes(len(view) // ALIGN_BYTES)

    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < len(view) // ALIGN_BYTES // 10


def test_huge_pages_are_taken_where_there_are_enough(path: Path) -> None:
    """`auto` says which pages it got and why.

    The memory is shared by descriptor, and by path only as a file.
    """
    arena = DramArena(path, SIZE_BYTES, huge_pages="auto")
    is_huge = arena.page_bytes == 2 << 20
    assert arena.write_fd is not None
    with mmap.mmap(arena.write_fd, SIZE_BYTES) as shared:
        shared[ALIGN_BYTES] = 7

        assert arena.view(SLOT)[0] == 7
    assert arena.shared_path == ("" if is_huge else str(path))
    assert path.exists() != is_huge
    assert arena.paths == (("memfd:ctxcache-arena",) if is_huge else (str(path),))
    assert is_huge or "needed: 4" in arena.pages_reason
    arena.close()


@pytest.mark.parametrize("huge_pages", ["off", "auto"])
@pytest.mark.parametrize("is_sealed", [False, True])
def test_what_is_given_to_read_cannot_be_written(
    path: Path, huge_pages: HugePages, *, is_sealed: bool
) -> None:
    """Whatever the pages are.

    The arena itself goes on being written, and sealed memory gives nothing to write through.
    """
    arena = DramArena(path, SIZE_BYTES, huge_pages=huge_pages, is_sealed=is_sealed)
    with pytest.raises(OSError, match=r"Permission denied|Operation not permitted"):
        mmap.mmap(arena.read_fd, SIZE_BYTES)
    with mmap.mmap(arena.read_fd, SIZE_BYTES, mmap.MAP_SHARED, mmap.PROT_READ) as shared:
        arena.view(SLOT)[0] = 7

        assert shared[SLOT.offset_bytes] == 7
    assert (arena.write_fd is None) == is_sealed
    assert path.exists() == (arena.page_bytes == ALIGN_BYTES and not is_sealed)
    arena.close()


def test_a_sealed_arena_takes_no_more_than_a_file_could(path: Path) -> None:
    """Memory without a name has no bound, and the kernel would kill for it."""
    with pytest.raises(CapacityExceeded):
        DramArena(path, 1 << 50, is_sealed=True)


def test_huge_pages_that_must_be_had_are_refused_with_what_is_there(path: Path) -> None:
    """`on` never falls back in silence, and leaves nothing behind."""
    needed_bytes = 1 << 50
    with pytest.raises(CapacityExceeded, match="huge pages"):
        DramArena(path, needed_bytes, huge_pages="on")
    with pytest.raises(InvalidConfiguration, match="2 MiB"):
        DramArena(path, SIZE_BYTES + ALIGN_BYTES, huge_pages="on")

    assert not path.exists()


def test_closing_removes_the_file_and_spares_the_views(arena: DramArena, path: Path) -> None:
    """A view that is still in use stays readable; the file's name is gone."""
    view = arena.view(SLOT)
    view[:5] = b"hello"
    arena.close()

    assert not path.exists()
    assert bytes(view[:5]) == b"hello"


def test_two_views_share_their_bytes(arena: DramArena) -> None:
    """A view is the memory itself, no copy of it."""
    arena.view(SLOT)[0] = 7

    assert arena.view(SLOT)[0] == 7


def test_arenas_of_killed_servers_are_removed_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    """A server that was killed and never started again does not keep its memory until the next boot."""
    killed, living = tmp_path / "ctxcache-a.arena", tmp_path / "ctxcache-b.arena"
    script = (
        f"import os; from ctxcache.storage.tiers.dram import DramArena; DramArena({str(killed)!r}, 65536);"
        " os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", script], check=False)
    arena = DramArena(living, 65536)

    assert killed.exists()
    assert remove_abandoned(tmp_path) == [str(killed)]
    assert living.exists()
    arena.close()
