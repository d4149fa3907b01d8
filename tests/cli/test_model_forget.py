"""`ctxcache model forget`: all of one version of a model's weights goes in one call, and nothing else."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from command_line import ctxcache, ctxcache_json
from server_process import ServerProcess
from stored import HIDDEN, ROW_BYTES, connected, model_spec

from ctxcache import connect
from ctxcache.cli.failures import ExitCode
from ctxcache.client import BlockSpace, CallerModel, Client
from ctxcache.client.types import Durability, LookupState
from ctxcache.errors import CacheError, InvalidArgument, ModelNotFound, SessionNotFound, WriteInProgress
from ctxcache.format.model import digest_of_version, has_version, with_version
from ctxcache.format.streams import TOKENS, Stream

TOKEN_COUNT = 128
BLOCKS = 70
"""More than one commit takes."""
VERSIONS = ("", "step-1", "step 2, the one of ünder")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ServerProcess]:
    """A store of the test's own."""
    with ServerProcess(tmp_path / "data") as server:
        yield server


def rows(version: str) -> dict[Stream, npt.NDArray[np.generic]]:
    """Tokens and rows of a session."""
    begin = 1000 * VERSIONS.index(version)
    return {
        TOKENS: np.arange(begin, begin + TOKEN_COUNT, dtype=np.int32).reshape(-1, 1),
        HIDDEN: np.full((TOKEN_COUNT, ROW_BYTES), VERSIONS.index(version), np.uint8),
    }


def space_of(version: str, salt: bytes) -> BlockSpace:
    """Where an engine keeps blocks of a version."""
    return BlockSpace(with_version(model_spec("tiny"), version).fingerprint(), "tag", salt)


def fill(client: Client) -> None:
    """Sessions, a fork, and blocks in two spaces, of each version; and of another model of a like name."""
    for version in VERSIONS:
        model = client.models.register(with_version(model_spec("tiny"), version))
        for number in range(2):
            id_ = f"{VERSIONS.index(version)}-{number}"
            session = client.sessions.create(model, id=id_, layout=[HIDDEN])
            session.append(rows(version), durability=Durability.DISK)
        client.sessions.open(session.name).fork(id=f"{VERSIONS.index(version)}-fork")
        for salt in (b"", bytes(32)):
            blocks = {n.to_bytes(32, "big"): np.full(4096, n, np.uint8) for n in range(BLOCKS)}
            client.blocks.put(space_of(version, salt), blocks, durability=Durability.DISK)
    other = client.models.register(with_version(model_spec("tiny2"), "step-1"))
    client.sessions.create(other, id="other", layout=[HIDDEN]).append(rows(""))


def left(client: Client, version: str) -> tuple[int, int, int]:
    """Of a version: sessions, blocks, and tokens that a new prompt finds by its prefix."""
    spec = with_version(model_spec("tiny"), version)
    sessions = [one for one in client.sessions.list() if one.model == f"models/{spec.model_id}"]
    keys = [n.to_bytes(32, "big") for n in range(BLOCKS)]
    found = [one for salt in (b"", bytes(32)) for one in client.blocks.look_up(space_of(version, salt), keys)]
    blocks = sum(one.state is LookupState.HIT for one in found)
    try:
        model = client.models.get(f"models/{spec.model_id}")
    except ModelNotFound:
        return len(sessions), blocks, 0
    ids = rows(version)[TOKENS].reshape(-1).tolist()
    return len(sessions), blocks, client.prefixes.match(model, ids, layout=[HIDDEN]).token_count


@pytest.mark.parametrize("is_restarted", [False, True], ids=["running", "restarted"])
@pytest.mark.parametrize("version", VERSIONS[1:])
def test_one_version_goes_and_no_other(
    store: ServerProcess,
    is_restarted: bool,  # noqa: FBT001  a parameter of the test
    version: str,
) -> None:
    """Sessions, forks, blocks of all spaces, prefixes, and the model; over a restart and a second one."""
    whole = (3, 2 * BLOCKS, TOKEN_COUNT)
    with connected(store.target) as client:
        fill(client)
        assert [left(client, one) for one in VERSIONS] == [whole] * 3
    if is_restarted:
        store.terminate()
        store.start()
    with connected(store.target) as client:
        told = client.models.forget("models/tiny", version, is_trial=True)
        assert [left(client, one) for one in VERSIONS] == [whole] * 3
        done = client.models.forget("models/tiny", version)
        assert told == done
        assert (done.session_count, done.token_count, done.block_count) == (3, 3 * TOKEN_COUNT, 2 * BLOCKS)
        assert done.models == (f"models/{with_version(model_spec('tiny'), version).model_id}",)
        with pytest.raises(ModelNotFound):
            client.models.forget("models/tiny", version)
    store.terminate()
    store.start()
    with connected(store.target) as client:
        expected = [(0, 0, 0) if one == version else whole for one in VERSIONS]
        assert [left(client, one) for one in VERSIONS] == expected
        assert client.sessions.get("sessions/other").token_count == TOKEN_COUNT
        # A version that was forgotten can be made anew.
        model = client.models.register(with_version(model_spec("tiny"), version))
        client.sessions.create(model, id=f"{VERSIONS.index(version)}-0", layout=[HIDDEN])


def test_files_are_a_version_by_their_digest(store: ServerProcess) -> None:
    """What no version was given for has the digest of its files, and goes by that alone."""
    spec = model_spec("tiny")
    digest = digest_of_version("files:0f", "step-1")
    assert has_version("files:0f", "files:0f")
    assert has_version(digest, "step-1")
    assert has_version(digest, digest)
    assert not has_version(digest, "files:0f")
    assert not has_version(digest, "1")
    assert not has_version("files:0f", "step-1")
    assert with_version(spec, "") == spec


def test_what_is_written_to_refuses_all_of_it(store: ServerProcess) -> None:
    """Nothing goes before it can be all. On the store's host a writer has its room from the begin on."""
    with connect(store.target) as client:
        fill(client)
        name = "sessions/1-0"
        model = CallerModel(with_version(model_spec("tiny"), "step-1"))
        writer = client.sessions.open(name, model).writer(64)
        with writer, pytest.raises(WriteInProgress, match="1-0"):
            client.models.forget("models/tiny", "step-1")
        assert left(client, "step-1") == (3, 2 * BLOCKS, TOKEN_COUNT)
        assert client.models.forget("models/tiny", "step-1").session_count == 3
        with pytest.raises(SessionNotFound):
            client.sessions.get(name)


def tag(version: str) -> str:
    """The end of a version's id."""
    return with_version(model_spec("tiny"), version).model_id.rpartition(".w")[2]


@pytest.mark.parametrize(
    ("name", "weights", "error", "field"),
    [
        ("models/tiny", "", InvalidArgument, "weights"),
        ("models/tiny", "x" * 257, InvalidArgument, "weights"),
        ("tiny", "step-1", InvalidArgument, "name"),
        ("models/nobody", "step-1", ModelNotFound, "nobody"),
        ("models/tiny", "step-9", ModelNotFound, "tiny"),
        ("models/tin", "step-1", ModelNotFound, "tin"),
    ],
)
def test_bad_input_changes_nothing(
    store: ServerProcess, name: str, weights: str, error: type[CacheError], field: str
) -> None:
    """And says what is wrong with it."""
    with connected(store.target) as client:
        fill(client)
        with pytest.raises(error, match=field):
            client.models.forget(name, weights)
        assert left(client, "step-1") == (3, 2 * BLOCKS, TOKEN_COUNT)


def test_the_command_says_what_went(store: ServerProcess) -> None:
    """As JSON, and for a person; a trial run leaves all as it is."""
    with connected(store.target) as client:
        fill(client)
    told = ctxcache_json(store.target, "model", "forget", "tiny", "--weights", "step-1", "--dry-run")
    done = ctxcache_json(store.target, "model", "forget", "tiny", "--weights", "step-1")
    assert told == done
    assert done == {
        "models": [f"models/tiny.w{tag('step-1')}"],
        "session_count": 3,
        "token_count": 3 * TOKEN_COUNT,
        "block_count": 2 * BLOCKS,
    }
    again = ctxcache("--target", store.target, "model", "forget", "tiny", "--weights", "step-1")
    assert again.exit_code == ExitCode.NOT_FOUND
    assert "(MODEL_NOT_FOUND)" in again.sentence
    table = ctxcache("--target", store.target, "model", "forget", "tiny", "--weights", VERSIONS[2])
    assert str(2 * BLOCKS) in table.stdout
