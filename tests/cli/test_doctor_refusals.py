"""Whatever refuses a start, the doctor says before: one sentence, one exit code, nothing changed."""

import fcntl
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from command_line import TIMEOUT_S, Ran, ctxcache
from failing_places import powerless, small_filesystem
from metadata_contract import make_model
from pki import Pki
from server_process import COMMAND_LINE, ServerProcess, write_secret

from ctxcache import connect
from ctxcache.cli.failures import ExitCode
from ctxcache.storage.data_directory import DATA_FORMAT
from tests.nursery import without_settings

STRANGER = 65534
Files = dict[str, tuple[int, int, bytes]]


@dataclass
class Place:
    """Where a start is to fail: directories below `root`, its options, and what ends with the test."""

    root: Path
    ends: ExitStack
    options: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    wrapper: tuple[str, ...] = ()

    @property
    def data(self) -> Path:
        """The data directory, which is not made yet."""
        return self.root / "data"

    def stored(self, *options: str) -> None:
        """Make a store with a record, and stop its server."""
        with ServerProcess(self.data, "--arena-directory", str(self.arena), *options) as server:
            with connect(server.target, access="remote") as client:
                client.models.register(make_model().spec)
            server.terminate()

    @property
    def arena(self) -> Path:
        """A directory for the arena alone, where no killed server has left anything."""
        return self.root / "arena"

    def taken(self) -> str:
        """A TCP address that somebody listens on."""
        listener = self.ends.enter_context(socket.create_server(("127.0.0.1", 0)))
        return f"127.0.0.1:{listener.getsockname()[1]}"

    def held(self, path: Path) -> None:
        """Lock a file as another server does."""
        file = self.ends.enter_context(path.open("rb+"))
        fcntl.flock(file, fcntl.LOCK_EX)

    def run(self, command: str) -> Ran:
        """Run a command with the options of the start."""
        options = {
            "--data-directory": str(self.data), "--arena-directory": str(self.arena),
            "--arena-size-bytes": "16MiB", "--ssd-size-bytes": "64MiB", "--arena-huge-pages": "off",
            "--listen": "127.0.0.1:0",
        }  # fmt: skip
        given = [
            word for name, value in options.items() if name not in self.options for word in (name, value)
        ]
        words = [command, *given, *self.options]
        if command == "doctor":
            words += ["--target", "127.0.0.1:1"]
        if not self.wrapper:
            return ctxcache(*words, environment=self.environment)
        process = subprocess.run(
            [*self.wrapper, *COMMAND_LINE, *words], env=without_settings(os.environ) | self.environment,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        return Ran(process.returncode, process.stdout, process.stderr)

    def files(self) -> Files:
        """Everything below the root: owner, mode and content of each. LOCK has the pid of who asked last."""
        found: Files = {}
        for path in self.root.rglob("*"):
            status = path.lstat()
            content = path.read_bytes() if stat.S_ISREG(status.st_mode) and path.name != "LOCK" else b""
            found[str(path)] = (status.st_uid, status.st_mode, content)
        return found


CASES: dict[str, tuple[ExitCode, Callable[[Place], None]]] = {}


def case(exit_code: ExitCode) -> Callable[[Callable[[Place], None]], Callable[[Place], None]]:
    """Add a case: what the function makes of a place is refused with that code."""

    def added(prepare: Callable[[Place], None]) -> Callable[[Place], None]:
        CASES[prepare.__name__] = (exit_code, prepare)
        return prepare

    return added


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A place in which a server could start."""
    with ExitStack() as ends:
        place = Place(tmp_path, ends)
        place.arena.mkdir()
        yield place


# -- settings ----------------------------------------------------------------------------------------


@case(ExitCode.CONFIGURATION)
def a_value_that_is_wrong(place: Place) -> None:
    """Validators refuse it."""
    place.options += ["--dram-high-watermark", "0.01"]


@case(ExitCode.CONFIGURATION)
def a_file_of_settings_that_is_wrong(place: Place) -> None:
    """The name is unknown."""
    file = place.root / "settings.toml"
    file.write_text('arena_size = "1GiB"')
    place.options += ["--config", str(file)]


@case(ExitCode.CONFIGURATION)
def an_unknown_variable(place: Place) -> None:
    """The variable is misspelt."""
    place.environment["CTXCACHE_AREAN_SIZE_BYTES"] = "1GiB"


@case(ExitCode.CONFIGURATION)
def more_copies_than_directories(place: Place) -> None:
    """Two copies need two directories."""
    place.options += ["--ssd-copies", "2"]


@case(ExitCode.CONFIGURATION)
def tracing_that_is_not_installed(place: Place) -> None:
    """The packages do not import."""
    package = place.root / "packages" / "opentelemetry"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('not here')\n")
    path = f"{package.parent}:{os.environ.get('PYTHONPATH', '')}"
    # A new interpreter: modules of a forked one are imported already.
    place.wrapper = ("env", f"PYTHONPATH={path}", "PYTHONDONTWRITEBYTECODE=1")
    place.options += ["--trace-endpoint", "http://127.0.0.1:4317"]


@case(ExitCode.RESOURCE_EXHAUSTED)
def a_bound_on_memory(place: Place) -> None:
    """The address space is bounded."""
    place.wrapper = ("prlimit", f"--as={1 << 30}")


# -- who may come in ---------------------------------------------------------------------------------


@case(ExitCode.CONFIGURATION)
def an_address_for_all_without_tls(place: Place) -> None:
    """The address is not loopback."""
    place.options += ["--listen", "0.0.0.0:7420"]


@case(ExitCode.CONFIGURATION)
def a_bulk_address_for_all_without_tls(place: Place) -> None:
    """The bulk address is not loopback."""
    place.options += ["--bulk-listen", "0.0.0.0:7423"]


@case(ExitCode.CONFIGURATION)
def a_certificate_without_its_key(place: Place) -> None:
    """One of the two is named."""
    place.options += ["--tls-certificate", str(place.root / "server.pem")]


@case(ExitCode.CONFIGURATION)
def a_certificate_that_is_missing(place: Place) -> None:
    """Neither file is there."""
    place.options += ["--tls-certificate", str(place.root / "a.pem"), "--tls-key", str(place.root / "a.key")]


@case(ExitCode.CONFIGURATION)
def a_key_that_others_may_read(place: Place) -> None:
    """Its mode is 0644."""
    pki = Pki(place.root)
    pki.authority("ca")
    certificate, key = pki.issue("server", "ca")
    key.chmod(0o644)
    place.options += ["--tls-certificate", str(certificate), "--tls-key", str(key)]


@case(ExitCode.CONFIGURATION)
def the_key_of_another_certificate(place: Place) -> None:
    """The two do not belong together."""
    pki = Pki(place.root)
    pki.authority("ca")
    certificate, _ = pki.issue("one", "ca")
    _, key = pki.issue("two", "ca")
    place.options += ["--metrics-tls-certificate", str(certificate), "--metrics-tls-key", str(key)]


@case(ExitCode.CONFIGURATION)
def authorities_that_are_none(place: Place) -> None:
    """The file has no certificate."""
    pki = Pki(place.root)
    pki.authority("ca")
    certificate, key = pki.issue("server", "ca")
    (place.root / "none.pem").write_text("none\n")
    place.options += ["--tls-certificate", str(certificate), "--tls-key", str(key)]
    place.options += ["--tls-client-ca", str(place.root / "none.pem")]


@case(ExitCode.CONFIGURATION)
def hashes_of_tokens_that_do_not_parse(place: Place) -> None:
    """A line is no token's."""
    write_secret(place.root / "hashes", "ops nothing\n")
    place.options += ["--token-hashes", str(place.root / "hashes")]


@case(ExitCode.CONFIGURATION)
def a_token_of_metrics_that_is_too_short(place: Place) -> None:
    """It could be guessed."""
    write_secret(place.root / "token", "short\n")
    place.options += ["--metrics-token-file", str(place.root / "token")]


# -- addresses ---------------------------------------------------------------------------------------


@case(ExitCode.CONFIGURATION)
def no_address_at_all(place: Place) -> None:
    """No client could reach the store."""
    place.options += ["--listen", "", "--unix-socket", ""]


@case(ExitCode.ADDRESS)
def a_port_that_is_taken(place: Place) -> None:
    """Somebody listens there."""
    place.options += ["--listen", place.taken()]


@case(ExitCode.ADDRESS)
def a_port_of_metrics_that_is_taken(place: Place) -> None:
    """Somebody listens there."""
    place.options += ["--metrics-listen", place.taken()]


@case(ExitCode.ADDRESS)
def a_port_of_the_bulk_channel_that_is_taken(place: Place) -> None:
    """Somebody listens there."""
    place.options += ["--bulk-listen", place.taken()]


@case(ExitCode.ADDRESS)
def one_port_for_two(place: Place) -> None:
    """The server would be in its own way."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    place.options += ["--listen", address, "--metrics-listen", address]


@case(ExitCode.ADDRESS)
def a_host_that_is_not_ours(place: Place) -> None:
    """No interface has the address, which is one for documents."""
    place.options += ["--listen", "192.0.2.1:7420", "--insecure-listen", "true"]


@case(ExitCode.ADDRESS)
def a_socket_whose_directory_is_missing(place: Place) -> None:
    """A start makes no such directory."""
    place.options += ["--unix-socket", str(place.root / "missing" / "a.sock")]


@case(ExitCode.ADDRESS)
def a_control_socket_whose_directory_is_missing(place: Place) -> None:
    """A start makes no such directory."""
    place.options += ["--control-socket", str(place.root / "missing" / "a.sock")]


@case(ExitCode.ADDRESS)
def a_socket_in_a_directory_of_others(place: Place) -> None:
    """It is another user's."""
    _strangers(place, place.root / "theirs")
    place.options += ["--unix-socket", str(place.root / "theirs" / "a.sock")]


@case(ExitCode.ADDRESS)
def a_socket_path_that_is_too_long(place: Place) -> None:
    """The kernel has a limit."""
    place.options += ["--unix-socket", "/" + "x" * 200]


@case(ExitCode.ADDRESS)
def a_socket_path_that_is_a_file(place: Place) -> None:
    """The file may be anybody's."""
    (place.root / "a.sock").write_text("mine")
    place.options += ["--unix-socket", str(place.root / "a.sock")]


@case(ExitCode.ADDRESS)
def a_control_socket_that_somebody_listens_to(place: Place) -> None:
    """Another server's socket is not taken away."""
    listener = place.ends.enter_context(socket.socket(socket.AF_UNIX))
    listener.bind(str(place.root / "a.sock"))
    listener.listen()
    place.options += ["--control-socket", str(place.root / "a.sock")]


@case(ExitCode.ADDRESS)
def one_path_for_two_sockets(place: Place) -> None:
    """The server would be in its own way."""
    place.options += ["--control-socket", str(place.root / "a"), "--unix-socket", str(place.root / "a")]


# -- the data directory ------------------------------------------------------------------------------


@case(ExitCode.DATA_DIRECTORY_UNUSABLE)
def a_file_in_the_place_of_the_data_directory(place: Place) -> None:
    """A file is no directory."""
    place.data.write_text("mine")


@case(ExitCode.DATA_DIRECTORY_UNUSABLE)
def a_data_directory_below_a_file(place: Place) -> None:
    """It cannot be made."""
    (place.root / "file").write_text("")
    place.options += ["--data-directory", str(place.root / "file" / "data")]


@case(ExitCode.DATA_DIRECTORY_UNUSABLE)
def a_data_directory_of_others(place: Place) -> None:
    """It may not be entered."""
    _strangers(place, place.data)


@case(ExitCode.DATA_DIRECTORY_UNUSABLE)
def a_data_directory_below_one_of_others(place: Place) -> None:
    """It cannot be made there."""
    _strangers(place, place.root / "theirs")
    place.options += ["--data-directory", str(place.root / "theirs" / "data")]


@case(ExitCode.DATA_DIRECTORY_UNUSABLE)
def a_data_directory_that_everybody_may_change(place: Place) -> None:
    """Its mode is 0777."""
    place.data.mkdir()
    place.data.chmod(0o777)


@case(ExitCode.DATA_DIRECTORY_UNUSABLE)
def a_data_directory_with_files_of_others(place: Place) -> None:
    """It has somebody's thesis."""
    place.data.mkdir(mode=0o700)
    (place.data / "thesis.txt").write_text("mine")


@case(ExitCode.DATA_DIRECTORY_UNUSABLE)
def a_file_of_another_user_within(place: Place) -> None:
    """One of our files is not ours."""
    if os.geteuid() != 0:
        pytest.skip("SKIPPED: only root can give a file away")
    place.stored()
    os.chown(place.data / "metadata" / "CURRENT", STRANGER, STRANGER)


@case(ExitCode.DATA_DIRECTORY_UNUSABLE)
def an_import_that_did_not_end(place: Place) -> None:
    """It has to begin anew."""
    place.data.mkdir(mode=0o700)
    (place.data / "RESTORING").write_text("{}")


@case(ExitCode.DATA_DIRECTORY_UNUSABLE)
def a_data_directory_that_is_held(place: Place) -> None:
    """Another process has its lock."""
    place.stored()
    place.held(place.data / "LOCK")


@case(ExitCode.RESOURCE_EXHAUSTED)
def a_data_directory_on_a_full_disk(place: Place) -> None:
    """There is no room for its first files."""
    small = place.ends.enter_context(small_filesystem(place.root / "small", "64k"))
    (small / "lost+found").write_bytes(b"x" * 65536)
    place.options += ["--data-directory", str(small), "--ssd-directories", str(place.root / "ssd")]


@case(ExitCode.FORMAT_TOO_NEW)
def a_newer_format(place: Place) -> None:
    """A later version wrote it."""
    place.data.mkdir(mode=0o700)
    facts = {"format": DATA_FORMAT + 1, "created_by": "later", "instance_id": "00"}
    (place.data / "FORMAT").write_text(json.dumps(facts))


@case(ExitCode.DATA_LOSS)
def a_format_that_does_not_parse(place: Place) -> None:
    """The file is damaged."""
    place.data.mkdir(mode=0o700)
    (place.data / "FORMAT").write_text("{")


@case(ExitCode.DATA_LOSS)
def runs_that_are_gone(place: Place) -> None:
    """The file is missing."""
    place.stored()
    (place.data / "RUNS").unlink()


@case(ExitCode.DATA_LOSS)
def a_data_directory_that_is_gone(place: Place) -> None:
    """Its SSD directory is in use."""
    ssd = ("--ssd-directories", str(place.root / "ssd"))
    place.stored(*ssd)
    shutil.rmtree(place.data)
    place.options += ssd


@case(ExitCode.DATA_LOSS)
def metadata_that_is_damaged(place: Place) -> None:
    """The manifest is garbage."""
    place.stored()
    for manifest in (place.data / "metadata").glob("MANIFEST-*"):
        manifest.write_bytes(b"garbage" * 100)


@case(ExitCode.DATA_LOSS)
def metadata_that_is_gone(place: Place) -> None:
    """The witness knows of it."""
    place.stored()
    shutil.rmtree(place.data / "metadata")


@case(ExitCode.DATA_DIRECTORY_UNUSABLE)
def metadata_that_another_process_has(place: Place) -> None:
    """The database's own lock is held."""
    place.stored()
    program = (
        "import fcntl, sys; file = open(sys.argv[1], 'rb+'); fcntl.lockf(file, fcntl.LOCK_EX);"
        "print('locked', flush=True); sys.stdin.read()"
    )
    # Locks of this kind are a process's own: it takes another one.
    holder = place.ends.enter_context(
        subprocess.Popen(
            [sys.executable, "-c", program, str(place.data / "metadata" / "LOCK")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"locked\n"


# -- SSD directories and the arena -------------------------------------------------------------------


@case(ExitCode.DATA_DIRECTORY_UNUSABLE)
def an_ssd_directory_of_others(place: Place) -> None:
    """It may not be entered."""
    _strangers(place, place.root / "theirs")
    place.options += ["--ssd-directories", str(place.root / "theirs")]


@case(ExitCode.DATA_DIRECTORY_UNUSABLE)
def an_ssd_directory_that_everybody_may_change(place: Place) -> None:
    """Its mode is 0777."""
    (place.root / "ssd").mkdir()
    (place.root / "ssd").chmod(0o777)
    place.options += ["--ssd-directories", str(place.root / "ssd")]


@case(ExitCode.DATA_DIRECTORY_UNUSABLE)
def an_ssd_directory_that_is_named_twice(place: Place) -> None:
    """One directory has one number."""
    place.options += ["--ssd-directories", str(place.root / "ssd")] * 2


@case(ExitCode.DATA_DIRECTORY_UNUSABLE)
def an_ssd_directory_of_another_store(place: Place) -> None:
    """It says whose it is."""
    other = Place(place.root / "other", place.ends)
    other.arena.mkdir(parents=True)
    other.stored()
    place.stored()
    place.options += ["--ssd-directories", str(other.data / "ssd")]


@case(ExitCode.DATA_DIRECTORY_UNUSABLE)
def an_ssd_directory_that_is_missing(place: Place) -> None:
    """Records name it."""
    first, second = (str(place.root / name) for name in ("first", "second"))
    place.stored("--ssd-directories", first, "--ssd-directories", second)
    place.options += ["--ssd-directories", first]


@case(ExitCode.DATA_DIRECTORY_UNUSABLE)
def an_ssd_file_that_is_held(place: Place) -> None:
    """Another process has its lock."""
    place.stored()
    place.held(place.data / "ssd" / "segments.dat")


@case(ExitCode.CONFIGURATION)
def an_ssd_file_that_would_have_to_shrink(place: Place) -> None:
    """Slots would be cut off."""
    place.stored()
    place.options += ["--ssd-size-bytes", "16MiB"]


@case(ExitCode.RESOURCE_EXHAUSTED)
def an_ssd_file_larger_than_the_disk(place: Place) -> None:
    """There is no room for it."""
    place.options += ["--ssd-size-bytes", "1024TiB"]


@case(ExitCode.RESOURCE_EXHAUSTED)
def an_ssd_file_that_cannot_grow(place: Place) -> None:
    """There is room for what is there."""
    place.stored()
    place.options += ["--ssd-size-bytes", "1024TiB"]


@case(ExitCode.RESOURCE_EXHAUSTED)
def an_arena_that_does_not_fit(place: Place) -> None:
    """The tmpfs is too small."""
    small = place.ends.enter_context(small_filesystem(place.root / "shm", "8m"))
    place.options += ["--arena-directory", str(small)]


@case(ExitCode.RESOURCE_EXHAUSTED)
def huge_pages_that_are_not_there(place: Place) -> None:
    """The pool has fewer."""
    place.options += ["--arena-huge-pages", "on", "--arena-size-bytes", "1024GiB"]


@case(ExitCode.CONFIGURATION)
def an_arena_of_half_a_huge_page(place: Place) -> None:
    """Huge pages are whole."""
    place.options += ["--arena-huge-pages", "on", "--arena-size-bytes", "3MiB"]


@case(ExitCode.CONFIGURATION)
def an_arena_of_one_page(place: Place) -> None:
    """It has no room for a row."""
    place.options += ["--arena-size-bytes", "1"]


@case(ExitCode.DEVICE)
def an_arena_directory_that_is_missing(place: Place) -> None:
    """A start makes no such directory."""
    place.options += ["--arena-directory", str(place.root / "missing")]


@case(ExitCode.DEVICE)
def an_arena_directory_that_is_missing_by_default_size(place: Place) -> None:
    """No size can be found for it."""
    place.options += ["--arena-directory", str(place.root / "missing"), "--arena-size-bytes", "0"]


@case(ExitCode.DEVICE)
def an_arena_directory_of_others(place: Place) -> None:
    """It may not be entered."""
    _strangers(place, place.root / "theirs")
    place.options += ["--arena-directory", str(place.root / "theirs")]


def _strangers(place: Place, directory: Path) -> None:
    """Make a directory of another user, for a process without root's power."""
    if os.geteuid() != 0:
        pytest.skip("SKIPPED: only root can give a directory away")
    directory.mkdir(mode=0o700)
    os.chown(directory, STRANGER, STRANGER)
    place.wrapper = powerless()


@pytest.mark.parametrize("name", CASES)
def test_the_doctor_says_what_the_start_says(place: Place, name: str) -> None:
    """The doctor is asked first, and leaves everything as it is; then the start is refused."""
    exit_code, prepare = CASES[name]
    prepare(place)
    before = place.files()

    told = place.run("doctor")
    between = place.files()
    refused = place.run("serve")

    assert refused.exit_code == exit_code, refused.stderr
    assert told.stderr.splitlines()[-1:] == refused.stderr.splitlines()[-1:]
    assert told.exit_code == exit_code
    assert between == before


def test_a_directory_of_others_is_told_with_both_users(place: Place) -> None:
    """The sentence has what chown needs."""
    a_data_directory_of_others(place)

    sentence = place.run("serve").stderr

    assert f"Permission denied: {place.data}, owner {STRANGER}, needed 0" in sentence


def test_a_refused_start_leaves_nothing(place: Place) -> None:
    """A refusal by the last check comes before the first file."""
    a_port_that_is_taken(place)
    before = place.files()

    assert place.run("serve").exit_code == ExitCode.ADDRESS
    assert place.files() == before


def test_a_start_that_makes_metadata_anew_is_no_failure(place: Place) -> None:
    """The setting allows it, and the finding says so."""
    metadata_that_is_damaged(place)
    place.options += ["--rebuild-metadata", "true"]

    ran = place.run("doctor")

    assert ran.exit_code == ExitCode.OK
    assert "metadata that the start makes anew" in ran.stdout
