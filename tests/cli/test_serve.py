"""`ctxcache serve`: what it says once it listens, how it ends, and what survives that."""

import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import get_args

import pytest
from command_line import ctxcache_json
from server_process import (
    ARENA_SIZE_BYTES,
    COMMAND_LINE,
    SSD_SIZE_BYTES,
    STOP_TIMEOUT_S,
    ServerProcess,
    write_secret,
)
from stored import TOKEN_COUNT, store_session

from ctxcache import __version__
from ctxcache.cli.failures import ExitCode
from ctxcache.errors import InvalidConfiguration
from ctxcache.fleet.opening import check_fleet
from ctxcache.server.server import miss_cost
from ctxcache.settings.config import Settings, default_data_directory
from ctxcache.settings.knobs import KNOBS
from ctxcache.simulate.load import Load, Prices
from tests.nursery import without_settings


def test_the_ready_line_says_where_everything_is(tmp_path: Path) -> None:
    """One line of JSON: version, addresses, directories, sizes, I/O mode, sessions found."""
    with ServerProcess(tmp_path / "data") as server:
        ready = server.ready

        assert (ready["event"], ready["version"], ready["pid"]) == ("ready", __version__, server.pid)
        assert ready["listen_addresses"][1] == f"unix:{tmp_path}/data/ctxcache.sock"
        assert ready["data_directory"] == str(tmp_path / "data")
        assert ready["arena"]["size_bytes"] == ARENA_SIZE_BYTES
        assert ready["ssd"][0]["path"] == str(tmp_path / "data" / "ssd" / "segments.dat")
        assert ready["ssd"][0]["size_bytes"] == SSD_SIZE_BYTES
        assert ready["ssd"][0]["io_mode"] in {"direct", "buffered"}
        assert ready["session_count"] == 0


def test_people_get_a_few_lines(tmp_path: Path) -> None:
    """Without --output json the same facts are lines for people, there before anything is asked."""
    arguments = ("--data-directory", str(tmp_path / "data"), "--listen", "127.0.0.1:0")
    sizes = ("--arena-size-bytes", "64MiB", "--ssd-size-bytes", "64MiB")
    command = [*COMMAND_LINE, "serve", *arguments, *sizes]
    with subprocess.Popen(
        command, env=without_settings(os.environ), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(10)]
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=STOP_TIMEOUT_S)

    assert lines[0] == f"ctxcache {__version__} is ready (pid {process.pid})\n"
    assert "listens on  127.0.0.1:" in lines[1]
    assert f"listens on  unix:{tmp_path}" in lines[2]
    assert "bulk        127.0.0.1:" in lines[3]
    assert f"bulk        unix:{tmp_path}" in lines[4]
    assert "0 sessions found" in lines[5]
    assert "64.0 MiB" in lines[6]
    assert f"{tmp_path}/data/control.sock" in lines[7]
    assert "/metrics" in lines[8]
    assert "64.0 MiB" in lines[9]
    assert process.returncode == ExitCode.OK
    assert "draining" in stderr
    assert "stopped: everything is on disk" in stderr


def test_sigterm_flushes_and_sessions_survive(tmp_path: Path) -> None:
    """A terminated server says that it drains, exits with 0, and comes back with all its tokens."""
    with ServerProcess(tmp_path / "data") as server:
        store_session(server.target, "survivor")
        exit_code = server.terminate()
        stderr = server.stderr
        server.start()
        survivor = ctxcache_json(server.target, "session", "show", "survivor")

        assert exit_code == ExitCode.OK
        assert "draining: no new work is taken" in stderr
        assert "stopped: everything is on disk" in stderr
        assert server.ready["session_count"] == 1
        assert (survivor["token_count"], survivor["durable_token_count"]) == (TOKEN_COUNT, TOKEN_COUNT)


def test_a_killed_server_starts_again_and_keeps_what_was_durable(tmp_path: Path) -> None:
    """After SIGKILL the flushed session is whole; nothing has to be cleaned up by hand."""
    with ServerProcess(tmp_path / "data") as server:
        store_session(server.target, "flushed")
        ctxcache_json(server.target, "session", "flush", "flushed")
        server.kill9()
        server.start()

        assert ctxcache_json(server.target, "session", "show", "flushed")["token_count"] == TOKEN_COUNT


def test_options_win_over_environment_and_that_over_the_file(tmp_path: Path) -> None:
    """Each source overrides the one below it, setting by setting."""
    file = tmp_path / "ctxcache.toml"
    file.write_text(
        'arena_size_bytes = "48MiB"\nssd_size_bytes = "48MiB"\nunix_socket = ""\ndrain_timeout_s = 1\n'
    )
    environment = {
        "CTXCACHE_CONFIG": str(file),
        "CTXCACHE_SSD_SIZE_BYTES": "32MiB",
        "CTXCACHE_LOG_LEVEL": "debug",
    }
    command = [
        *COMMAND_LINE,
        "serve",
        "-o",
        "json",
        "--data-directory",
        str(tmp_path / "data"),
        "--listen",
        "127.0.0.1:0",
    ]
    with subprocess.Popen(
        [*command, "--arena-size-bytes", "16MiB"],
        env=without_settings(os.environ) | environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        process.terminate()

    assert ready["arena"]["size_bytes"] == 16 << 20
    assert ready["ssd"][0]["size_bytes"] == 32 << 20
    assert len(ready["listen_addresses"]) == 1


def test_several_ssd_directories_are_one_tier(tmp_path: Path) -> None:
    """--ssd-directories repeats, and the environment separates them like PATH."""
    places = [tmp_path / "one", tmp_path / "two"]
    others = [tmp_path / "three", tmp_path / "four"]
    options = [part for place in places for part in ("--ssd-directories", str(place))]
    environment = {"CTXCACHE_SSD_DIRECTORIES": ":".join(map(str, others))}
    with ServerProcess(tmp_path / "a", *options) as by_option:
        listed = [place["path"] for place in by_option.ready["ssd"]]
        by_option.terminate()
    with ServerProcess(tmp_path / "b", environment=environment) as by_environment:
        listed_too = [place["path"] for place in by_environment.ready["ssd"]]

    assert listed == [str(place / "segments.dat") for place in places]
    assert listed_too == [str(place / "segments.dat") for place in others]


def test_every_setting_is_a_knob() -> None:
    """Settings, --help, documents and chart have the same settings, in one order, with the same words."""
    fields = Settings.model_fields

    assert list(KNOBS) == list(fields)
    for name, knob in KNOBS.items():
        if knob.choices:
            assert get_args(fields[name].annotation) == knob.choices


def test_the_default_data_directory_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a setting, data lie in the user's state directory, as --help says."""
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))

    shown = KNOBS["data_directory"].default_text.split("else ")[1]

    assert str(default_data_directory()) == shown.replace("~", str(tmp_path))


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_changes_nothing(tmp_path: Path, second: signal.Signals) -> None:
    """A second signal still leads to an orderly end."""
    with ServerProcess(tmp_path / "data") as server:
        store_session(server.target, "safe")
        os.kill(server.pid, signal.SIGTERM)
        os.kill(server.pid, second)

        assert server.terminate() == ExitCode.OK


def test_what_cannot_be_flushed_is_said_at_the_end(tmp_path: Path) -> None:
    """A session larger than the whole SSD tier is lost on shutdown, and the exit code says so."""
    with ServerProcess(tmp_path / "data", "--ssd-size-bytes", "65536") as server:
        store_session(server.target, "too-large", token_count=2000)

        assert server.terminate() == ExitCode.RESOURCE_EXHAUSTED
        assert "no room in SSD" in server.stderr
        assert "stopped" not in server.stderr


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--listen", "{taken}"], ExitCode.ADDRESS, "cannot listen on {taken}: Address already in use"),
        (
            ["--metrics-listen", "{taken}"],
            ExitCode.ADDRESS,
            "cannot listen on {taken}: Address already in use",
        ),
        (["--bulk-listen", "{taken}"], ExitCode.ADDRESS, "cannot listen on {taken}: Address already in use"),
        (
            ["--listen", "192.0.2.1:7420", "--insecure-listen", "true"],
            ExitCode.ADDRESS,
            "Cannot assign requested",
        ),
        (["--unix-socket", "{place}/none/it.sock"], ExitCode.ADDRESS, "there is no directory {place}/none"),
        (["--control-socket", "{place}/file"], ExitCode.ADDRESS, "a file that is no socket is there"),
        (["--listen", "", "--unix-socket", ""], ExitCode.CONFIGURATION, "neither a TCP address nor a Unix"),
        (["--listen", "0.0.0.0:0"], ExitCode.CONFIGURATION, "is not loopback"),
        (
            ["--tls-certificate", "{place}/no.pem", "--tls-key", "{place}/no.key"],
            ExitCode.CONFIGURATION,
            "no.pem",
        ),
        (["--metrics-token-file", "{place}/no.token"], ExitCode.CONFIGURATION, "metrics_token_file"),
        (["--token-hashes", "{place}/no.hashes"], ExitCode.CONFIGURATION, "no.hashes: No such file"),
    ],
)
def test_a_start_that_is_refused_leaves_no_file(
    tmp_path: Path, options: list[str], code: ExitCode, words: str
) -> None:
    """Whatever it is refused for outside its data directory: that is looked at first."""
    (tmp_path / "file").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        names = {"taken": f"127.0.0.1:{taken.getsockname()[1]}", "place": str(tmp_path)}
        command = [*COMMAND_LINE, "serve", "--data-directory", str(tmp_path / "data")]
        command += ["--listen", "127.0.0.1:0"]
        command += [option.format(**names) for option in options]
        ended = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=60, env=without_settings(os.environ)
        )

    assert words.format(**names) in ended.stderr
    assert ended.returncode == code
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_wear_is_weighed_by_the_prices_that_are_set(tmp_path: Path) -> None:
    """As the simulator does at the same prices; by none of them without the other."""

    def cost(engine: int, written: int) -> float:
        settings = Settings(data_directory=tmp_path, engine_cents_per_hour=engine, write_cents_per_tb=written)
        return miss_cost(settings).write_s_per_byte

    simulated = Load(prices=Prices(gpu_hour=5, written_tb=0.07), spares_wear=True).miss_cost

    assert cost(500, 7) == pytest.approx(simulated.write_s_per_byte)
    assert cost(500, 0) == cost(0, 7) == 0


def test_a_bucket_by_price_needs_the_price_of_an_engine(tmp_path: Path) -> None:
    """Nothing else says what computing costs."""
    write_secret(tmp_path / "secret", "a secret of more than thirty-two bytes")

    def checked(cents: int) -> None:
        settings = Settings(
            data_directory=tmp_path / "data",
            listen="127.0.0.1:7431",
            fleet_bucket=f"file://{tmp_path / 'bucket'}",
            fleet_secret_file=tmp_path / "secret",
            fleet_share="worth",
            engine_cents_per_hour=cents,
        )
        check_fleet(settings)

    checked(500)
    with pytest.raises(InvalidConfiguration, match="engine_cents_per_hour"):
        checked(0)
