"""The command table: every command of `ctxcache`, what --help says of it, and the module that brings it.

    ctxcache --help          lists the table, and imports no command
    ctxcache session list    imports `ctxcache.cli.sessions`, and with it all that this command needs

A command's module imports what it needs at its top, however heavy. Each such module has an `app` with its
commands.

Packages bring commands, too: functions, or Typer apps of several, under the entry point group
`ctxcache.commands`. An entry point named `trace.replay` is the command `replay` of our group `trace`. Such a
plugin is imported when it is called, since it may need torch. Worst case: a plugin needs what is not
installed, and one sentence says what to install.
"""

import gc
import os
import sys
from collections.abc import Callable
from enum import Enum
from functools import partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from ctxcache.cli.documents import Output
from ctxcache.cli.failures import ExitCode, UsageFailure, asked_output
from ctxcache.settings.words import plain_words


class CommandLine(NamedTuple):
    """A command of ours before it is imported.

    Its module in `ctxcache.cli`, and its help's first sentence.
    """

    module: str
    help: str


COMMANDS = {
    # In the order of --help: what is used every day comes first.
    "serve": CommandLine("serve", "Run the server until SIGTERM or Ctrl-C."),
    "doctor": CommandLine(
        "doctor.command",
        "Say what this machine offers a server, what is used instead of what is missing, and what to do.",
    ),
    "stats": CommandLine("stats", "Show what the server holds and has done since it started."),
    "top": CommandLine(
        "top",
        "Show what goes on: tiers, hit rates, calls and how long they take, who is busy, what needs a look.",
    ),
    "session": CommandLine("sessions", "Look at sessions and change them."),
    "model": CommandLine("sessions", "Look at registered models."),
    "why-miss": CommandLine(
        "stats",
        "Say why a session is not there, or has less than was stored; or what a request missed, and why.",
    ),
    "health": CommandLine(
        "stats", "Say whether the server takes work, as probes ask it; exits with 6 where it does not."
    ),
    "export": CommandLine(
        "transfers", "Write sessions to a file that `import` reads, for this store or another."
    ),
    "import": CommandLine("transfers", "Bring in sessions that `export` wrote: each whole, or not at all."),
    "drain": CommandLine("operations", "Take no more work, and write everything: before a node goes."),
    "verify": CommandLine(
        "verify",
        "Verify every record and every segment, in memory as on SSD; sessions end before what is bad.",
    ),
    "rebuild": CommandLine(
        "rebuild",
        "Make damaged or deleted metadata anew from the SSD directories, while no server runs.",
    ),
    "fleet": CommandLine("fleet", "Look at the stores of a fleet, and tidy up their bucket."),
    "config": CommandLine("config", "Look at settings, and change them."),
    "token": CommandLine("tokens", "Make tokens for clients."),
    "tenants": CommandLine("stats", "Show what each tenant has, and what is its share."),
    "quota": CommandLine("operations", "Look at tenants' shares and change them."),
    "tier": CommandLine("operations", "Look at tiers, and take SSD paths out of use."),
    "lease": CommandLine("operations", "Look at leases, which keep bytes in memory, and end them."),
    "hint": CommandLine("sessions", "Give hints, and look at engines' queues."),
    "prefix": CommandLine("prefixes", "Look for prompts by tokens, and at what sessions share."),
    "trace": CommandLine("trace", "Record what a store is asked, and ask it of another."),
    "size": CommandLine(
        "size", "Say how much DRAM and SSD so many users need, what it finds, and what it saves."
    ),
    "simulate": CommandLine(
        "simulate",
        "Replay a trace of sessions through placement policies on a virtual clock, and say what each keeps.",
    ),
    "fault": CommandLine("operations", "Inject faults into a server for tests."),
    "version": CommandLine("stats", "Show the version of this program, and of the server."),
}
PLUGINS = "ctxcache.commands"
OURS = ("ctxcache", "gpu_worker")
"""Packages of this distribution: one of theirs that is missing is a bug, not something to install."""
LAB = "ctxcache-lab"
"""The distribution that measures and shows this one. A clone has it in `lab/`; no wheel of ours holds it."""
LAB_COMMANDS = {"bench": "./lab[bench]", "demo": "./lab[demo]", "trace.replay": "./lab"}
"""The commands that LAB registers, each with the distribution to install.

They are listed without it too, and then say how to get it.
"""
DESCRIPTIONS = {
    "bench": "Measure each path beside the machine's limit and beside a peer.",
    "demo": "Show on a small real model what the cache saves.",
    "trace.replay": "Ask another store what was recorded, and compare.",
    "worker": "Serve engines, plan restorations, measure what plans are made from, and age idle sessions.",
}


# From a name to a command, with as little imported as can be:
#
#     --help, completion of a name    the table below, and names of entry points      no command's module
#     a command of ours               its module, replaced in the table               once it is called
#     a plugin                        its entry point                                 once it is run
#     a lab's command, not installed  a command that says how to get it
class CommandGroup(TyperGroup):
    """All commands by name: ours as the table lists them, then plugins.

    A command of ours takes its own form once it is called.
    """

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        ours = {name: TyperCommand(name, help=listed.help) for name, listed in COMMANDS.items()}
        # A plugin's name never hides one of ours, and --help lists it after them.
        self.commands = ours | {name: one for name, one in plugins().items() if name not in ours}
        spare_models(self)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import the command that is called, or whose words a shell completes."""
        if args[0] in COMMANDS:
            self.commands[args[0]] = imported(args[0])
        return super().resolve_command(ctx, args)


def imported(name: str) -> Any:
    """One of our commands, with everything that it needs."""
    # Objects of modules live on: the collector would look through them again and again, and find nothing.
    gc.disable()
    try:
        module = import_module(f"ctxcache.cli.{COMMANDS[name].module}")
    finally:
        gc.enable()
    gc.freeze()
    command = get_group(module.app).commands[name]
    if isinstance(command, TyperGroup):
        command.commands.update(plugins(name))
    spare_models(command)
    return command


def spare_models(command: Any) -> None:
    """Let a command's parameters take values as they are that need no conversion.

    typer makes a pydantic model for each parameter: pydantic takes longer to import than a small command to
    run. Typer refuses any other value, with a sentence of its own.
    """
    # Parameters are made when they are asked for: so the asking is wrapped, and each parameter once.
    command.get_params = partial(_spared, command.get_params)
    command.format_help = partial(_with_whole_names, command.format_help)
    for each in getattr(command, "commands", {}).values():
        spare_models(each)


def _with_whole_names(format_help: Callable[[Any, Any], None], context: Any, formatter: Any) -> None:
    """Print help in which the names of options are whole, however narrow the screen is."""
    # Imported for help alone: rich takes longer to import than a small command to run.
    from typer import rich_utils  # noqa: PLC0415

    from ctxcache.cli.help_table import HelpTable  # noqa: PLC0415

    rich_utils.Table = HelpTable  # type: ignore[attr-defined]  # typer has no other way in
    format_help(context, formatter)


def _spared(get_params: Callable[[Any], Any], context: Any) -> Any:
    parameters = get_params(context)
    for one in parameters:
        if "process_value" not in vars(one):
            one.process_value = partial(_processed, one, one.process_value)
    return parameters


def _processed(parameter: Any, process: Callable[[Any, Any], Any], context: Any, value: Any) -> Any:
    """As `process` has it, refused in our words. `parameter` is click's, which typer brings or not."""
    try:
        return _taken(parameter, process, context, value)
    except UsageFailure as error:
        error.message = plain_words(str(error.message))  # type: ignore[attr-defined]  # click's has it
        raise


def _taken(parameter: Any, process: Callable[[Any, Any], Any], context: Any, value: Any) -> Any:
    kind = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
    if parameter.multiple or parameter.nargs != 1 or kind is None:
        return process(context, value)
    if value is None and not parameter.required:
        return None if parameter.callback is None else parameter.callback(context, parameter, None)
    plain = None if parameter.callback else _plain(parameter, kind, value)
    return process(context, value) if plain is None else plain


def _plain(parameter: Any, kind: type[Any], value: Any) -> Any:
    """A value as the command takes it, where no conversion is needed; None for a value that needs one."""
    # A number that a user gives has bounds. A default was checked by its author.
    if type(value) is kind and (kind is str or value == parameter.default):
        return value
    if not isinstance(value, str):
        return None
    if isinstance(kind, type) and issubclass(kind, Enum):
        return next((each for each in kind if each.value == value), None)
    is_name_alone = kind is Path and not _is_checked(parameter.type_descriptor.parameter_info, value)
    return Path(value) if is_name_alone else None


def _is_checked(info: Any, path: str) -> bool:
    """Whether a parameter checks more of a path than that a file can be read there."""
    is_more = info.allow_dash or info.resolve_path or info.writable or not info.file_okay or info.path_type
    return bool(is_more) or not (Path(path).is_file() and os.access(path, os.R_OK))


def plugins(group: str = "") -> dict[str, Any]:
    """Other packages' commands for one of our groups, by name; without a group those beside our own."""
    commands = {each.name: _command(each) for each in entry_points(group=PLUGINS)}
    absent = {name: _absent(needed) for name, needed in LAB_COMMANDS.items() if name not in commands}
    app = typer.Typer()
    for name, command in sorted((commands | absent).items()):
        owner, _, last = name.rpartition(".")
        # An entry point that names no group of ours is a command by its whole name.
        if group == (owner if owner in COMMANDS else ""):
            app.command(
                last if group else name,
                help=DESCRIPTIONS.get(name, f"Plugin {name}."),
                add_help_option=False,
                context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
            )(command)
    return dict(get_group(app).commands) if app.registered_commands else {}


def _command(entry_point: EntryPoint) -> Callable[[typer.Context], None]:
    def command(context: typer.Context) -> None:
        try:
            _run(entry_point, context)
        except ModuleNotFoundError as error:
            missing = error.name or ""
            # A missing module of ours, or of the plugin's own, is a bug, and its traceback is wanted.
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
    """The requirement that installs a plugin's needs.

    The extra of its name, of the distribution that registers it.
    """
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
