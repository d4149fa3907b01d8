"""The wheel: what it holds, and what its commands say that need the lab."""

import ast
import email
import json
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from command_line import TIMEOUT_S

from ctxcache.cli.failures import ExitCode
from tests.nursery import without_settings

ROOT = Path(__file__).parents[2]
OF_THE_CLONE = ("ctxcache", "_ctxcache", "_editable_impl_ctxcache")
"""How the names begin that an editable installation leaves beside the packages."""
LINE = (
    "ctxcache: `ctxcache {}` is part of ctxcache-lab, which is not installed; "
    "in a clone of the project: pip install './lab{}'\n"
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as the build back end makes it."""
    made = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(made)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=TIMEOUT_S)
    (path,) = made.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The settings of a Python that has the wheel and what it needs, and nothing of the clone."""
    return installed(wheel, tmp_path_factory.mktemp("installed"))


def installed(wheel: Path, place: Path, *, without: tuple[str, ...] = ()) -> dict[str, str]:
    """A Python's settings, as `environment`; `without` names packages that it does not have."""
    with zipfile.ZipFile(wheel) as file:
        file.extractall(place / "wheel")
    (place / "needs").mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(OF_THE_CLONE) and path.name not in without:
            (place / "needs" / path.name).symlink_to(path)
    return without_settings(os.environ) | {"PYTHONPATH": f"{place / 'wheel'}:{place / 'needs'}"}


def run(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """Run the wheel's command; -S: what is installed beside it is not looked for."""
    return run_python(environment, "from ctxcache.cli.start import main; main()", *words)


def run_python(environment: dict[str, str], source: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the wheel."""
    command = [sys.executable, "-S", "-c", source, *words]
    return subprocess.run(
        command, cwd="/", env=environment, check=False, capture_output=True, text=True, timeout=TIMEOUT_S
    )


def test_it_holds_the_two_packages_and_nothing_else(wheel: Path) -> None:
    """No lab, no tests, no results."""
    with zipfile.ZipFile(wheel) as file:
        tops = {name.partition("/")[0] for name in file.namelist()}

    assert {top for top in tops if not top.endswith(".dist-info")} == {"ctxcache", "gpu_worker"}
    assert len(tops) == 3


def test_it_holds_the_contract_and_says_that_it_is_typed(wheel: Path) -> None:
    """Every `.proto` lies where its own imports look for it, and type checkers take both packages' types."""
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    protos = {str(path.relative_to(ROOT / "proto")) for path in (ROOT / "proto").rglob("*.proto")}

    assert len(protos) > 5
    assert protos | {"ctxcache/py.typed", "gpu_worker/py.typed"} <= names


def test_its_metadata_is_whole(wheel: Path) -> None:
    """An index can show what it is, for what, under which licence and where its documents are."""
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(file.read(name))

    classifiers = metadata.get_all("Classifier", [])
    assert metadata["License-Expression"] == "Apache-2.0"
    assert {"Typing :: Typed", "Operating System :: POSIX :: Linux"} <= set(classifiers)
    assert {url.partition(",")[0] for url in metadata.get_all("Project-URL", [])} == {
        "Changelog",
        "Documentation",
        "Source",
    }
    assert str(metadata.get_payload()).startswith("# ctxcache")


def test_it_tells_its_version(wheel: Path, environment: dict[str, str]) -> None:
    """The option and the command say the version of the wheel's own name."""
    version = wheel.name.split("-")[1]
    option, command = run(environment, "--version"), run(environment, "version")

    assert (option.returncode, option.stdout) == (ExitCode.OK, f"ctxcache {version}\n")
    assert command.stdout == option.stdout


@pytest.mark.parametrize(("words", "extra"), [("bench", "[bench]"), ("demo", "[demo]"), ("trace replay", "")])
def test_a_command_of_the_lab_says_how_to_get_it(words: str, extra: str, environment: dict[str, str]) -> None:
    """One line, and the exit code of what is not installed; as a document where one is asked for."""
    ran = run(environment, *words.split(), "--anything")
    document = run(environment, "--output", "json", *words.split())

    assert (ran.returncode, ran.stdout, ran.stderr) == (ExitCode.USAGE, "", LINE.format(words, extra))
    assert document.returncode == ExitCode.USAGE
    assert f"ctxcache: {json.loads(document.stderr)['error']['message']}\n" == LINE.format(words, extra)


def test_its_help_lists_them(environment: dict[str, str]) -> None:
    """Beside those that it brings, of which none is missing."""
    ran = run(environment, "--help")

    assert ran.returncode == ExitCode.OK, ran.stderr
    assert all(f" {name} " in ran.stdout for name in ("bench", "demo", "serve", "simulate", "worker"))


def test_the_client_imports_no_more_than_the_wheel_alone_brings(
    wheel: Path, environment: dict[str, str]
) -> None:
    """Each distribution behind a name of `ctxcache.client` is a requirement with no extra; none is cffi."""
    source = (
        "import sys; from ctxcache.client import *\n"
        "from importlib.metadata import packages_distributions\n"
        "found = {name.partition('.')[0] for name in sys.modules}\n"
        "places = packages_distributions()\n"
        "print(sorted({one for name in found for one in places.get(name, [])}))\n"
        "print(sorted(found & {'cffi', '_cffi_backend', 'cryptography', 'torch', 'typer', 'pydantic'}))"
    )
    ran = run_python(environment, source)
    assert ran.returncode == 0, ran.stderr
    distributions, unwanted = (ast.literal_eval(line) for line in ran.stdout.splitlines())
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(file.read(name))
    alone = {
        re.split(r"[<>=!~ ;]", line)[0].lower()
        for line in metadata.get_all("Requires-Dist", [])
        if "extra ==" not in line
    }

    assert unwanted == []
    # Names of packages may be shared, as `google` is: what they bring is looked at by distribution.
    needed = {one.lower().replace("_", "-") for one in distributions} - {"ctxcache"}
    assert {"grpcio", "numpy", "protobuf"} <= needed
    shared = {one for one in needed if one.startswith(("google", "grpcio"))}
    assert needed - shared <= alone


@pytest.mark.parametrize(
    ("absent", "command"), [("typer", "serve"), ("rocksdict", "serve"), ("pydantic", "config")]
)
def test_what_only_an_extra_brings_is_named(wheel: Path, tmp_path: Path, absent: str, command: str) -> None:
    """One sentence says what to install, and the exit code is that of wrong usage."""
    environment = installed(wheel, tmp_path, without=(absent,))

    ran = run(environment, command, "show")

    assert ran.returncode == ExitCode.USAGE
    assert ran.stderr == (
        f"ctxcache: `ctxcache {command}` needs {absent}, which is not installed; "
        "install it with pip install 'ctxcache[server]'\n"
    )


def test_a_part_of_ours_that_is_missing_is_a_bug(wheel: Path, tmp_path: Path) -> None:
    """No message says to install a part that the wheel should have brought."""
    environment = installed(wheel, tmp_path)
    (tmp_path / "wheel/ctxcache/cli/main.py").write_text("import ctxcache.no_such_part")

    ran = run(environment, "serve")

    assert ran.returncode == ExitCode.INTERNAL
    assert "Traceback" in ran.stderr
