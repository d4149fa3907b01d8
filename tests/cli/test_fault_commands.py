"""Faults through the real binary: injected, listed, met, cleared; and refused where nobody asked for them."""

from collections.abc import Iterator

import pytest
from command_line import asked, ctxcache, ctxcache_json
from operated import SESSION, operated_server, prepare
from server_process import ServerProcess

from ctxcache.cli.failures import ExitCode


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server for tests, with two SSD paths."""
    with operated_server(tmp_path_factory.mktemp("faulty")) as started:
        yield started


@pytest.fixture
def target(server: ServerProcess) -> str:
    """Its address; it has one session and no faults."""
    prepare(server.target)
    return str(server.target)


def test_a_fault_is_injected_listed_and_cleared(target: str, server: ServerProcess) -> None:
    """With all that was asked for."""
    directory = str(server.data_directory.parent / "other")
    options = ("--delay", "0.25s", "--count", "7", "--duration", "5min", "--path", directory)
    injected = ctxcache_json(target, "fault", "inject", "write-delay", *options)
    (listed,) = ctxcache_json(target, "fault", "list")["faults"]
    shown = ctxcache("--target", target, "fault", "list")
    cleared = ctxcache_json(target, "fault", "clear")

    assert (listed["fault_id"], listed["kind"]) == (injected["fault_id"], "FAULT_KIND_SSD_WRITE_DELAY")
    assert (listed["left_count"], listed["delay"]) == (7, "0.250s")
    assert listed["path"] == f"{directory}/segments.dat"
    heads, row = shown.stdout.splitlines()
    assert heads.split() == ["FAULT", "KIND", "PATH", "HOW", "TIMES", "FOR"]
    assert row.split()[1:6] == ["ssd_write_delay", listed["path"], "0.25", "s", "7"]
    assert cleared == {"cleared_fault_count": 1}
    assert asked(target, "fault", "list").document["faults"] == []


@pytest.mark.parametrize(
    ("kind", "options", "name"),
    [
        ("read-error", ("--errno", "eremoteio"), "SSD_READ_ERROR"),
        ("write-error", (), "SSD_WRITE_ERROR"),
        ("bit-flip", (), "SSD_READ_BIT_FLIP"),
        ("read-delay", ("--delay", "1s"), "SSD_READ_DELAY"),
        ("commit-delay", ("--delay", "1s"), "COMMIT_DELAY"),
    ],
)
def test_each_kind_has_its_word(target: str, kind: str, options: tuple[str, ...], name: str) -> None:
    """Errors are EIO unless another is named."""
    injected = asked(target, "fault", "inject", kind, *options).document

    assert injected["kind"] == f"FAULT_KIND_{name}"
    assert injected["error_number"] == {"read-error": 121, "write-error": 5}.get(kind, 0)


def test_a_wrong_bit_is_met_and_told(target: str) -> None:
    """By whoever reads, and by `why-miss`."""
    ctxcache_json(target, "session", "demote", SESSION)
    asked(target, "fault", "inject", "bit-flip")
    verified = ctxcache("--target", target, "verify")
    why = ctxcache_json(target, "why-miss", SESSION)

    assert verified.exit_code == ExitCode.DATA_LOSS
    assert why["reason"] == "MISS_EVENT_CORRUPT"
    assert ctxcache_json(target, "verify", "--release")["released_slot_count"] == 1


@pytest.mark.parametrize(
    "options",
    [
        ("read-delay",),
        ("bit-flip", "--delay", "1s"),
        ("bit-flip", "--errno", "EIO"),
        ("read-error", "--errno", "EWHAT"),
        ("read-delay", "--delay", "soon"),
        ("meteor",),
    ],
    ids=" ".join,
)
def test_what_makes_no_sense_is_no_fault(target: str, options: tuple[str, ...]) -> None:
    """A usage error."""
    assert asked(target, "fault", "inject", *options).exit_code == ExitCode.USAGE
    assert asked(target, "fault", "list").document["faults"] == []


def test_any_other_server_refuses(tmp_path_factory: pytest.TempPathFactory) -> None:
    """With a sentence that says what it would have to be started with."""
    with ServerProcess(tmp_path_factory.mktemp("real") / "data") as real:
        ran = ctxcache("--target", real.target, "fault", "inject", "bit-flip")

    assert ran.exit_code == ExitCode.CONFIGURATION
    assert ran.sentence.endswith("started without fault_injection (FAULTS_NOT_ENABLED)")
