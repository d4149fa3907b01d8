"""Commands of other packages: functions, or Typer apps of several, under the entry point group `ctxcache.commands`.

An entry point named `trace.replay` is the command `replay` of our group `trace`.

A plugin is imported when it is called and never to list it, since it may need torch. Worst case: it
needs what is not installed, which is one sentence that says what to install.
"""

import sys
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import NoReturn

import typer

from ctxcache.cli.exit_codes import ExitCode
from ctxcache.cli.failures import UsageFailure, asked_output
from ctxcache.cli.output import Output

GROUP = "ctxcache.commands"
OURS = ("ctxcache", "gpu_worker")
"""Packages of this distribution: one of theirs that is missing is a bug, not something to install."""
LAB = "ctxcache-lab"
"""The distribution that measures and shows this one. A clone has it in `lab/`; no wheel of ours holds it."""
LAB_COMMANDS = {"bench": "./lab[bench]", "demo": "./lab[demo]", "trace.replay": "./lab"}
"""What LAB registers, and what to install for each. They are listed without it too, and then say how to get it."""
DESCRIPTIONS = {
    "bench": "Measure each path beside the machine's limit and beside a peer.",
    "demo": "Show on a small real model what the cache saves.",
    "trace.replay": "Ask another store what was recorded, and compare.",
    "worker": "Serve engines, plan restorations, and measure what plans are made from.",
}


def add_plugins(app: typer.Typer, groups: Mapping[str, typer.Typer]) -> None:
    """Add a command for every plugin, by name alone; those named `GROUP.NAME` to one of `groups`."""
    found = {entry_point.name: _command(entry_point) for entry_point in entry_points(group=GROUP)}
    absent = {name: _absent(needed) for name, needed in LAB_COMMANDS.items() if name not in found}
    for name, command in sorted((found | absent).items()):
        group, _, last = name.rpartition(".")
        owner = groups.get(group)
        (owner or app).command(
            last if owner else name,
            help=DESCRIPTIONS.get(name, f"Plugin {name}."),
            add_help_option=False,
            context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
        )(command)


def _command(entry_point: EntryPoint) -> Callable[[typer.Context], None]:
    def command(context: typer.Context) -> None:
        try:
            _run(entry_point, context)
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if not missing or missing.partition(".")[0] in (*OURS, entry_point.module.partition(".")[0]):
                raise
            _refuse(
                f"`{context.command_path}` needs {missing}, which is not installed; "
                f"install it with pip install {_requirement(entry_point)}",
                error,
            )

    return command


def _run(entry_point: EntryPoint, context: typer.Context) -> None:
    plugin = entry_point.load()
    if not isinstance(plugin, typer.Typer):
        plugin = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        plugin.command()(entry_point.load())
    # Wrong words of the plugin's own command are reported as those of any other command.
    code = plugin(args=context.args, prog_name=context.command_path, standalone_mode=False, obj=context.obj)
    if isinstance(code, int) and code:
        raise typer.Exit(code)


def _requirement(entry_point: EntryPoint) -> str:
    """What brings a plugin's needs: the extra of its name, of the distribution that registers it."""
    distribution = entry_point.dist.name if entry_point.dist else "ctxcache"
    extra = f"{distribution}[{entry_point.name}]"
    return f"'{LAB_COMMANDS.get(entry_point.name, extra) if distribution == LAB else extra}'"


def _absent(needed: str) -> Callable[[typer.Context], None]:
    def command(context: typer.Context) -> None:
        _refuse(
            f"`{context.command_path}` is part of {LAB}, which is not installed; "
            f"in a clone of the project: pip install '{needed}'"
        )

    return command


def _refuse(problem: str, cause: Exception | None = None) -> NoReturn:
    if asked_output(sys.argv[1:]) is not Output.TABLE:
        raise UsageFailure(problem) from cause
    sys.stderr.write(f"ctxcache: {problem}\n")
    raise typer.Exit(ExitCode.USAGE) from cause
