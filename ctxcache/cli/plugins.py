"""Commands of other packages: functions, or Typer apps of several, under the entry point group `ctxcache.commands`.

A plugin is imported when it is called and never to list it, since it may need torch. Worst case: it
needs what is not installed, which is one sentence that says what to install.
"""

import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

import typer

from ctxcache.cli.exit_codes import ExitCode

GROUP = "ctxcache.commands"
OURS = ("ctxcache", "gpu_worker")
"""Packages of this distribution: one of theirs that is missing is a bug, not something to install."""
DESCRIPTIONS = {
    "demo": "Show on a small real model what the cache saves.",
    "worker": "Serve engines, plan restorations, and measure what plans are made from.",
}


def add_plugins(app: typer.Typer) -> None:
    """Add a command for every plugin, by name alone."""
    for entry_point in entry_points(group=GROUP):
        app.command(
            entry_point.name,
            help=DESCRIPTIONS.get(entry_point.name, f"Plugin {entry_point.value}."),
            add_help_option=False,
            context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        )(_command(entry_point))


def _command(entry_point: EntryPoint) -> Callable[[typer.Context], None]:
    def command(context: typer.Context) -> None:
        try:
            _run(entry_point, context)
        except ModuleNotFoundError as error:
            if error.name and error.name.partition(".")[0] in OURS:
                raise
            sys.stderr.write(
                f"ctxcache: `{context.command_path}` needs {error.name}, which is not installed; "
                f"install it with pip install 'ctxcache[{entry_point.name}]'\n"
            )
            raise typer.Exit(ExitCode.USAGE) from error

    return command


def _run(entry_point: EntryPoint, context: typer.Context) -> None:
    plugin = entry_point.load()
    if not isinstance(plugin, typer.Typer):
        plugin = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        plugin.command()(entry_point.load())
    plugin(args=context.args, prog_name=context.command_path)
