"""The demo's own server: real, killable, and gone afterwards."""

from pathlib import Path

import pytest

from ctxcache.errors import CapacityExceeded
from ctxcache.format.streams import DType, StateKind, Stream, StreamSpec
from lab.demo.embedded_store import StoreDidNotStart, embedded_store, require_room
from tests.model_specs import small_model

_SIZE_BYTES = 16 << 20
_SPEC = small_model(
    StreamSpec(Stream(0, StateKind.KV), 64, DType.FLOAT32),
    model_id="m",
    architecture="Test",
    dtype=DType.FLOAT32,
    hidden_size=8,
    head_size=8,
)


def test_after_a_kill_another_process_has_the_data() -> None:
    """Acknowledged rows are there under another process id; both are gone in the end."""
    with embedded_store(_SIZE_BYTES) as store:
        first_pid = store.ready.pid
        store.client.sessions.create(store.client.models.register(_SPEC), id="kept")
        killed_pid = store.kill()
        ready = store.start()
        session = store.client.sessions.get("sessions/kept")

    assert killed_pid == first_pid != ready.pid
    assert ready.session_count == 1
    assert session.name == "sessions/kept"
    assert not any(Path(f"/proc/{pid}").exists() for pid in (first_pid, ready.pid))


def test_a_named_directory_is_kept_and_used_again(tmp_path: Path) -> None:
    """Its data outlives the block, and a store of another size opens it."""
    with embedded_store(_SIZE_BYTES, tmp_path / "data") as store:
        store.client.sessions.create(store.client.models.register(_SPEC), id="kept")

    with embedded_store(2 * _SIZE_BYTES, tmp_path / "data") as store:
        assert store.ready.session_count == 1


def test_a_store_that_cannot_start_says_why(tmp_path: Path) -> None:
    """The server's own sentence is the error's."""
    (tmp_path / "someone-elses").write_text("x")

    with pytest.raises(StoreDidNotStart, match="someone-elses"), embedded_store(_SIZE_BYTES, tmp_path):
        pass


def test_too_little_space_is_found_before_anything_starts(tmp_path: Path) -> None:
    """The error has the directory, what is needed and what is free."""
    with pytest.raises(CapacityExceeded) as caught:
        require_room(tmp_path, 1 << 60)

    assert caught.value.tier == str(tmp_path)
    assert int(caught.value.needed_bytes) > int(caught.value.free_bytes) > 0


def test_a_killed_store_has_no_client() -> None:
    """Between kill and start there is nobody to talk to, and that is an error with a name."""
    with embedded_store(_SIZE_BYTES) as store:
        store.kill()

        with pytest.raises(StoreDidNotStart, match="not running"):
            _ = store.client
