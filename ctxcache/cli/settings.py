"""Commands that take a server's settings: an option per knob, and the file.

Options are texts; `settings.config` reads them, as it reads the environment and the file.
"""

import inspect
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ctxcache.cli.options import CONTEXT, OutputOption, option, with_signature
from ctxcache.settings.config import Settings, Source, load_with_sources
from ctxcache.settings.knobs import KNOBS, Knob, KnobKind

_CONFIG = Annotated[
    Path | None,
    typer.Option("--config", envvar="CTXCACHE_CONFIG", metavar="FILE.toml", help="File with settings."),
]


def setting_options(shown: Collection[str] = KNOBS.keys()) -> list[inspect.Parameter]:
    """Return the parameters of a command that takes settings; --help has those in `shown`."""
    knobs = (
        option(knob.name, _annotation(knob, is_hidden=name not in shown)) for name, knob in KNOBS.items()
    )
    return [option("config", _CONFIG), *knobs]


def taking_settings(
    *own: inspect.Parameter, shared: Sequence[inspect.Parameter] = (option("output", OutputOption),)
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command that takes its context, options of its own, every setting, and shared options."""

    def decorated(function: Callable[..., None]) -> Callable[..., None]:
        parameters = [CONTEXT, *own, *setting_options(), *shared]
        return with_signature(function, parameters, name=function.__name__, doc=function.__doc__)

    return decorated


def load_settings(given: dict[str, Any]) -> Settings:
    """Take the settings out of what a command was given. Raises InvalidConfiguration."""
    return settings_of(given)[0]


def settings_of(given: dict[str, Any]) -> tuple[Settings, dict[str, Source]]:
    """Take the settings out of what a command was given, and where each comes from.

    Raises InvalidConfiguration.
    """
    file = given.pop("config")
    # An option that may be repeated and was not is an empty list.
    arguments = {name: None if (value := given.pop(name)) == [] else value for name in KNOBS}
    return load_with_sources(arguments, file=file)


def _annotation(knob: Knob, *, is_hidden: bool) -> object:
    shown = typer.Option(
        knob.option,
        metavar=knob.kind.metavar,
        help=_help(knob),
        show_default=knob.default_text,
        hidden=is_hidden,
    )
    # A list's text is one value per occurrence; every other option is given once.
    return Annotated[list[str] | None if knob.kind is KnobKind.DIRECTORIES else str | None, shown]


def _help(knob: Knob) -> str:
    of = f" [{knob.unit}]" if knob.kind is KnobKind.SHARE and knob.unit else ""
    words = f" One of: {', '.join(knob.choices)}." if knob.choices else ""
    return f"{knob.help}{words}{of}"
