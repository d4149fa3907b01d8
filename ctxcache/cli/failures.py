"""Failures and their exit codes: one sentence for people, a document for scripts, a number for shells.

Both texts go to standard error: standard output has only the answer. docs/commands.md has the table of exit
codes too. Worst case: words that cannot be read. The option that says how to print is looked for among
them all the same.
"""

import enum
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from ctxcache import errors
from ctxcache.cli.documents import Output, Plain, as_json, as_yaml
from ctxcache.cli.units import human_size
from ctxcache.errors import CacheError, Status


class ExitCode(enum.IntEnum):
    """The exit code of the process. Numbers are never given to another meaning."""

    OK = 0
    INTERNAL = 1
    USAGE = 2
    NOT_FOUND = 3
    CONFLICT = 4
    INVALID_ARGUMENT = 5
    UNAVAILABLE = 6
    RESOURCE_EXHAUSTED = 7
    DATA_LOSS = 8
    DATA_DIRECTORY_UNUSABLE = 9
    FORMAT_TOO_NEW = 10
    CONFIGURATION = 11
    ADDRESS = 12
    DEVICE = 13
    UNAUTHENTICATED = 14
    PERMISSION_DENIED = 15


BY_STATUS: dict[Status, ExitCode] = {
    "INVALID_ARGUMENT": ExitCode.INVALID_ARGUMENT,
    "OUT_OF_RANGE": ExitCode.INVALID_ARGUMENT,
    "UNAUTHENTICATED": ExitCode.UNAUTHENTICATED,
    "PERMISSION_DENIED": ExitCode.PERMISSION_DENIED,
    "NOT_FOUND": ExitCode.NOT_FOUND,
    "ALREADY_EXISTS": ExitCode.CONFLICT,
    "ABORTED": ExitCode.CONFLICT,
    "FAILED_PRECONDITION": ExitCode.CONFLICT,
    "RESOURCE_EXHAUSTED": ExitCode.RESOURCE_EXHAUSTED,
    "UNAVAILABLE": ExitCode.UNAVAILABLE,
    "DEADLINE_EXCEEDED": ExitCode.UNAVAILABLE,
    "DATA_LOSS": ExitCode.DATA_LOSS,
    "CANCELLED": ExitCode.INTERNAL,
    "INTERNAL": ExitCode.INTERNAL,
}
"""The exit code of an error, by its status."""
BY_CLASS: dict[type[CacheError], ExitCode] = {
    errors.TooManyRequests: ExitCode.UNAVAILABLE,
    errors.DataDirectoryUnusable: ExitCode.DATA_DIRECTORY_UNUSABLE,
    errors.FormatTooNew: ExitCode.FORMAT_TOO_NEW,
    errors.InvalidConfiguration: ExitCode.CONFIGURATION,
    errors.FaultsNotEnabled: ExitCode.CONFIGURATION,
    errors.AddressUnusable: ExitCode.ADDRESS,
    errors.TierFailure: ExitCode.DEVICE,
    errors.FileUnusable: ExitCode.DEVICE,
    errors.FileFull: ExitCode.RESOURCE_EXHAUSTED,
}
"""Errors that scripts tell apart from others of their status."""


def exit_code_of(error: CacheError) -> ExitCode:
    """Return an error's exit code."""
    special = (BY_CLASS[base] for base in type(error).__mro__ if base in BY_CLASS)
    return next(special, BY_STATUS[error.status])


ADVICE: dict[type[CacheError], str] = {
    errors.Unavailable: "is a server running there? `ctxcache serve` starts one",
    errors.TlsFailed: "see --tls-ca, --tls-client-certificate, --tls-client-key and --tls-server-name",
    errors.DeadlineExceeded: "--timeout allows more",
    errors.GenerationMismatch: "look at it again before you change it",
    errors.WriteInProgress: "try again when its writer has finished",
    errors.SessionMoved: "ask the store at which it goes on: `ctxcache fleet status` names them",
    errors.SessionInUse: "try again when its reader has finished",
    errors.ModelInUse: "`ctxcache session delete`, or `ctxcache model forget` for one version of its weights",
    errors.CorruptMetadata: "`ctxcache rebuild` makes it anew from what is whole, --dry-run says what that "
    "is",
    errors.NothingToRebuild: "put back a copy of all its directories, or `ctxcache import --new-store` an "
    "archive into a new one",
    errors.FormatTooNew: "install the version that wrote it, or a newer one",
    errors.FileAlreadyExists: "choose another name; only `export --force` replaces a file",
    errors.Unauthenticated: "--token-file or --tls-client-certificate say who you are",
    errors.PermissionDenied: "docs/security.md says whom a server lets in as what",
    errors.AddressUnusable: "choose another with --listen or --unix-socket",
}

# From click, or from typer, which brings its own click since some version.
UsageFailure: type[Exception] = next(
    each for each in typer.BadParameter.__mro__ if each.__name__ == "ClickException"
)
_OPTIONS = ("-o", "--output")


def asked_output(words: Sequence[str]) -> Output:
    """How a command is to print: the last word that says it, whether or not the others can be read."""
    output = Output.TABLE
    # typer is not asked: words that cannot be read as options may still say how the refusal is printed.
    for before, word in zip(("", *words), words, strict=False):
        if word == "--":
            break
        text = word if before in _OPTIONS else ""
        # `-ojson`, `-o=json` and `--output=json` are one word.
        for option in _OPTIONS:
            if word.startswith(option) and word not in _OPTIONS:
                text = word.removeprefix(option).removeprefix("=")
        if text in list(Output):
            output = Output(text)
    return output


def sentence(error: CacheError) -> str:
    """Return one line: what happened, what to do, and the stable reason in parentheses."""
    advice = ADVICE.get(type(error))
    text = " ".join(fact(error).split())
    return f"{text}{f'; {advice}' if advice else ''} ({error.reason})"


def fact(error: CacheError) -> str:
    """The failure in words, without advice."""
    if (
        isinstance(error, errors.CapacityExceeded)
        and {"tier", "needed_bytes", "free_bytes"} <= error.facts.keys()
    ):
        needed, free = (human_size(int(error.facts[name])) for name in ("needed_bytes", "free_bytes"))
        return f"no room in {error.tier}: {needed} needed, {free} free"
    if isinstance(error, errors.Unavailable) and {"target", "problem"} <= error.facts.keys():
        if isinstance(error, errors.TlsFailed):
            return f"no TLS with {error.target}: {error.problem}"
        problem = str(error.problem)
        # gRPC names the address three times, and the cause last.
        return f"no answer from {error.target}: {problem.rpartition(': ')[2]}"
    return str(error)


def error_document(error: CacheError, output: Output) -> str:
    """The document of an error of ours."""
    # gRPC takes half a second to import, and only such a document needs it.
    from ctxcache.wire.status import code_of  # noqa: PLC0415

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
    """The document of typer's refusal of a command's words."""
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
    """The option or argument that the error is about; empty for none."""
    named = getattr(error, "param_hint", None) or getattr(error, "option_name", None)
    parameter = getattr(error, "param", None)
    if not named and parameter is not None:
        named = next(reversed(parameter.opts), parameter.name) if parameter.opts else parameter.name
    return "" if not named else str(named if isinstance(named, str) else named[0]).strip("'")


def _document(output: Output, *, facts: Mapping[str, object], **values: Plain) -> str:
    plain: dict[str, Plain] = {
        name: value if isinstance(value, int) else str(value) for name, value in facts.items()
    }
    document: dict[str, Plain] = {"error": {**values, "facts": plain}}
    return as_json(document) if output is Output.JSON else as_yaml(document)
