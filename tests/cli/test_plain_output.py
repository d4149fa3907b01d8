"""What people read: our own words, right plurals, and no traceback for Ctrl-C."""

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from command_line import TIMEOUT_S, ctxcache, ctxcache_json
from server_process import COMMAND_LINE, ServerProcess
from stored import store_session

from ctxcache.cli.commands import COMMANDS
from ctxcache.cli.failures import ExitCode
from tests.nursery import without_settings

WIDTH = 80


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("serve", "--max-concurrent-rpcs", "many"), "max_concurrent_rpcs: is not a whole number"),
        (("serve", "--keepalive-s", "0"), "keepalive_s: 1 is the least"),
        (("serve", "--keepalive-s", "1e9"), "keepalive_s: 3600 is the most"),
        (("serve", "--default-ttl-s", "soon"), "default_ttl_s: 'soon' is not a time such as 90s"),
        (("serve", "--arena-prefault", "maybe"), "arena_prefault: is neither true nor false"),
        (("serve", "--log-level", "x"), "log_level: is not 'debug', 'info', 'warning' or 'error'"),
        (("session", "list", "--limit", "0"), "'--limit': 1 is the least"),
        (("session", "list", "--limit", "x"), "'--limit': is not a whole number"),
        (("session", "list", "--timeout", "-1"), "'--timeout': 0.001 is the least"),
        (("session", "list", "--timeout", "nan"), "'--timeout': is not a finite number"),
        (("worker", "serve", "--store-timeout-s", "-1"), "'--store-timeout-s': 0.001 is the least"),
    ],
)
def test_a_refused_value_is_refused_in_our_words(words: tuple[str, ...], said: str) -> None:
    """A library's words tell of inputs, and what they should be."""
    ran = ctxcache(*words)

    assert ran.exit_code in (ExitCode.CONFIGURATION, ExitCode.USAGE)
    assert said in " ".join(ran.stderr.split())
    assert not re.search("input|pydantic|grpc", ran.stderr, re.IGNORECASE)


def test_a_tier_is_shown_by_its_name(running_server: ServerProcess) -> None:
    """In any case; SSD's one path as if it had been named."""
    target = running_server.target

    by_name = [ctxcache_json(target, "tier", "show", name)["tier"] for name in ("DRAM", "dram", "Ssd")]
    unknown = ctxcache("--target", target, "tier", "show", "tape")

    assert by_name == ["TIER_DRAM", "TIER_DRAM", "TIER_SSD"]
    assert unknown.exit_code == ExitCode.USAGE
    assert "'tape' is none of DRAM, SSD, " in " ".join(unknown.stderr.replace("│", "").split())


def test_one_is_no_plural(tmp_path: Path) -> None:
    """One session, one model, one lease."""
    with ServerProcess(tmp_path / "data") as server:
        store_session(server.target, "only", token_count=1)
        stats = ctxcache("--target", server.target, "stats").stdout
        why = ctxcache("--target", server.target, "why-miss", "only").stdout

    assert "1 of 1 model\n" in re.sub(" +\n", "\n", stats)
    assert "1 token\n" in re.sub(" +\n", "\n", stats)
    assert "is there: 1 token, of which" in why


def test_ctrl_c_while_commands_are_imported_is_quiet(tmp_path: Path) -> None:
    """It ends with 130, as it does later."""
    # The command's own module stops where an import of any of its parts could be interrupted.
    package = tmp_path / "typer"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nsignal.pause()\n"
    )
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    ran = subprocess.run(
        [sys.executable, "-c", "from ctxcache.cli.start import main; main()", "stats"],
        env=without_settings(os.environ) | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )

    assert (ran.returncode, ran.stdout, ran.stderr) == (128 + signal.SIGINT, "", "")


def on_a_screen(target: str, *words: str) -> list[str]:
    """The lines that a terminal of 80 columns shows."""
    terminal, other_end = pty.openpty()
    fcntl.ioctl(other_end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, WIDTH, 0, 0))
    with subprocess.Popen(
        [*COMMAND_LINE, "--target", target, *words],
        env=without_settings(os.environ) | {"TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stdout=other_end,
        stderr=subprocess.PIPE,
    ):
        os.close(other_end)
        shown = b""
        # The end of a terminal whose other end is closed is an error.
        with contextlib.suppress(OSError):
            while part := os.read(terminal, 1 << 16):
                shown += part
    os.close(terminal)
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).replace("\r", "").splitlines()


def test_tables_fit_80_columns_with_whole_names(tmp_path: Path) -> None:
    """One line for each fact; what does not fit is left out, and long paths lose their middle."""
    name = "conversation-of-user-4711-of-2026-11-29"
    ssd = tmp_path / ("a-long-name-of-a-directory-" * 3)
    with ServerProcess(tmp_path / "data", "--ssd-directories", str(ssd)) as server:
        store_session(server.target, name, token_count=64)
        tables = {
            words: on_a_screen(server.target, *words)
            for words in (("session", "list"), ("model", "list"), ("tier", "list"), ("tenants",), ("stats",))
        }

    for words, lines in tables.items():
        assert max(map(len, lines)) <= WIDTH, words
        assert "sessions/" not in "".join(lines), words
    for words in (("session", "list"), ("model", "list"), ("tenants",)):
        assert len(tables[words]) == 2, tables[words]
    assert tables["session", "list"][1].startswith(f"{name} ")
    assert len(tables["tier", "list"]) == 3
    assert re.search(r" /\S+…\S*/segments\.dat ", tables["tier", "list"][2])


@pytest.mark.parametrize("words", [(), ("serve",), ("doctor",), ("session", "list"), ("session", "delete")])
def test_help_of_80_columns_has_whole_options(words: tuple[str, ...]) -> None:
    """Whatever their length."""
    shown = ctxcache(*words, "--help", environment={"COLUMNS": str(WIDTH)}).stdout
    options = re.findall(r"^│ *\*? *(--[^ ]+)", shown, re.MULTILINE)

    assert len(options) > 2
    assert not [option for option in options if "…" in option]
    assert max(map(len, shown.splitlines())) <= WIDTH


def test_what_is_used_every_day_comes_first() -> None:
    """Before what is for tests and studies."""
    shown = re.findall(r"^│ ([a-z-]+) ", ctxcache("--help").stdout.partition("Commands")[2], re.MULTILINE)

    assert shown[:6] == ["serve", "doctor", "stats", "top", "session", "model"]
    assert shown[: len(COMMANDS)] == list(COMMANDS)
