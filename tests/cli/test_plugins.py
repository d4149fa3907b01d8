"""Commands of other packages: found by name, imported only when they are called."""

from pathlib import Path

import pytest
from command_line import ctxcache

from ctxcache.cli.failures import ExitCode

PLUGIN = '''
"""A plugin."""
import sys
{imports}

def wave(times: int = 1) -> None:
    """Wave to whoever looks."""
    print("wave " * times)
'''


def install(place: Path, imports: str = "") -> dict[str, str]:
    """Put a distribution with one plugin on the path; return the environment that finds it."""
    (place / "waving.py").write_text(PLUGIN.format(imports=imports))
    metadata = place / "waving-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: waving\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[ctxcache.commands]\nwave = waving:wave\n")
    return {"PYTHONPATH": str(place)}


def test_a_plugin_is_a_command_with_options_of_its_own(tmp_path: Path) -> None:
    """Its function's parameters are its options, its docstring its help."""
    environment = install(tmp_path)

    ran = ctxcache("wave", "--times", "2", environment=environment)
    shown = ctxcache("wave", "--help", environment=environment)

    assert ran.stdout == "wave wave \n"
    assert "Wave to whoever looks." in shown.stdout


def test_a_plugin_may_be_an_app_of_several_commands(tmp_path: Path) -> None:
    """A Typer app under the entry point brings its own commands, each with its options."""
    app = (
        "\nimport typer\nwaves = typer.Typer()\nwaves.command()(wave)\n\n@waves.command()\ndef rest() -> "
        "None:\n    pass\n"
    )
    environment = install(tmp_path)
    (tmp_path / "waving.py").open("a").write(app)
    (tmp_path / "waving-1.0.dist-info" / "entry_points.txt").write_text(
        "[ctxcache.commands]\nwave = waving:waves\n"
    )

    ran = ctxcache("wave", "wave", "--times", "2", environment=environment)
    shown = ctxcache("wave", "--help", environment=environment)

    assert ran.stdout == "wave wave \n"
    assert "rest" in shown.stdout


def test_a_plugin_that_is_listed_is_not_imported(tmp_path: Path) -> None:
    """Help names a plugin that could not even be imported."""
    environment = install(tmp_path, "sys.exit('imported')")

    listed = ctxcache("--help", environment=environment)

    assert listed.exit_code == ExitCode.OK
    assert " wave " in listed.stdout


def test_a_plugin_that_needs_what_is_not_installed_says_what_to_install(tmp_path: Path) -> None:
    """One sentence, and the exit code of wrong usage."""
    ran = ctxcache("wave", environment=install(tmp_path, "import no_such_torch"))

    assert ran.exit_code == ExitCode.USAGE
    assert ran.sentence == (
        "ctxcache: `ctxcache wave` needs no_such_torch, which is not installed; "
        "install it with pip install 'waving[wave]'"
    )


@pytest.mark.parametrize("module", ["ctxcache", "gpu_worker", "waving"])
def test_a_missing_part_of_ours_is_a_bug(tmp_path: Path, module: str) -> None:
    """No message says to install a part that this distribution should have brought."""
    ran = ctxcache("wave", environment=install(tmp_path, f"import {module}.no_such_part"))

    assert ran.exit_code == ExitCode.INTERNAL
    assert "Traceback" in ran.stderr
