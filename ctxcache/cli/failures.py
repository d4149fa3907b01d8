"""What went wrong, as a document for scripts: of a server, of a file, of the words of the command itself.

It goes to standard error: on standard output is what was asked for, and nothing else. Worst case: words that cannot be
read, for which how to print is looked for among them all the same.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from ctxcache.cli.exit_codes import ExitCode, exit_code_of
from ctxcache.cli.output import Output
from ctxcache.cli.sentences import ADVICE, fact
from ctxcache.errors import CacheError

if TYPE_CHECKING:
    from ctxcache.cli.plain import Plain

# Of click, or of typer, which has its own click since a version.
UsageFailure: type[Exception] = next(
    each for each in typer.BadParameter.__mro__ if each.__name__ == "ClickException"
)
_OPTIONS = ("-o", "--output")


def asked_output(words: Sequence[str]) -> Output:
    """How a command is to print, whether or not its other words can be read: the last that says it."""
    found = Output.TABLE
    for before, word in zip(("", *words), words, strict=False):
        if word == "--":
            break
        text = word if before in _OPTIONS else ""
        for option in _OPTIONS:
            if word.startswith(option) and word not in _OPTIONS:
                text = word.removeprefix(option).removeprefix("=")
        if text in list(Output):
            found = Output(text)
    return found


def error_document(error: CacheError, output: Output) -> str:
    """An error of ours."""
    from ctxcache.wire.status import code_of  # noqa: PLC0415  grpc is half the start time of --help

    facts = {name: value for name, value in error.facts.items() if name not in ("field", "source", "problem")}
    return _document(
        output,
        status=code_of(error).name,
        reason=error.reason,
        message=" ".join(fact(error).split()),
        field=str(error.facts.get("field", error.facts.get("source", ""))),
        hint=ADVICE.get(type(error), ""),
        exit_code=exit_code_of(error),
        facts=facts,
    )


def usage_document(error: Any, output: Output) -> str:
    """What typer has against the words of a command."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "ctxcache"
    is_empty = type(error).__name__ == "NoArgsIsHelpError"
    return _document(
        output,
        status="INVALID_ARGUMENT",
        reason="USAGE",
        message="a command is needed" if is_empty else " ".join(error.format_message().split()),
        field=_field(error),
        hint=f"`{path} -h` says what it takes",
        exit_code=ExitCode.USAGE,
        facts={},
    )


def _field(error: Any) -> str:
    """The option or argument that it is about; empty for none."""
    named = getattr(error, "param_hint", None) or getattr(error, "option_name", None)
    parameter = getattr(error, "param", None)
    if not named and parameter is not None:
        named = next(reversed(parameter.opts), parameter.name) if parameter.opts else parameter.name
    return "" if not named else str(named if isinstance(named, str) else named[0]).strip("'")


def _document(output: Output, *, facts: Mapping[str, object], **values: "Plain") -> str:
    from ctxcache.cli.documents import as_json, as_yaml  # noqa: PLC0415  it imports protobuf

    plain: dict[str, Plain] = {
        name: value if isinstance(value, int) else str(value) for name, value in facts.items()
    }
    document: dict[str, Plain] = {"error": {**values, "facts": plain}}
    return as_json(document) if output is Output.JSON else as_yaml(document)
