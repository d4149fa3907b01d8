"""The entry point: runs the command that was called, and turns every failure into a sentence and a code.

Knows no server, no gRPC and no torch: a command's own module imports them, see `commands`. Worst case: a bug
of ours, which is a traceback and exit code 1.
"""

import errno
import importlib.metadata
import os
import sys
from contextlib import suppress
from typing import Annotated, NoReturn

import typer

from ctxcache.cli.commands import CommandGroup
from ctxcache.cli.documents import Output, examples
from ctxcache.cli.failures import (
    ExitCode,
    UsageFailure,
    asked_output,
    error_document,
    exit_code_of,
    sentence,
    usage_document,
)
from ctxcache.cli.options import (
    CaOption,
    CertificateOption,
    Credentials,
    KeyOption,
    OutputOption,
    ServerNameOption,
    TargetOption,
    TimeoutOption,
    TokenFileOption,
    before_the_command,
)
from ctxcache.errors import CacheError, FileFull

app = typer.Typer(
    name="ctxcache",
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _say_version(is_asked: bool | None) -> None:  # noqa: FBT001  as a callback is called
    if is_asked:
        typer.echo(f"ctxcache {importlib.metadata.version('ctxcache')}")
        raise typer.Exit


@app.callback(
    epilog=examples("ctxcache --install-completion", "ctxcache --target 127.0.0.1:7420 --output json stats")
)
def shared_options(
    context: typer.Context,
    target: TargetOption = None,
    output: OutputOption = None,
    timeout: TimeoutOption = None,
    token_file: TokenFileOption = None,
    tls_ca: CaOption = None,
    tls_client_certificate: CertificateOption = None,
    tls_client_key: KeyOption = None,
    tls_server_name: ServerNameOption = None,
    version: Annotated[  # noqa: ARG001  its callback ends the command
        bool | None,
        typer.Option(
            "--version",
            help="Say which version this is.",
            is_eager=True,
            callback=_say_version,
            show_default=False,
        ),
    ] = None,
) -> None:
    """Keep sessions' state for LLM inference, and restore their KV cache from it."""
    credentials = Credentials(token_file, tls_ca, tls_client_certificate, tls_client_key, tls_server_name)
    context.obj = before_the_command(credentials, target, output, timeout)


def main() -> None:
    """Run the command line; ends the process with a code of `exit_codes.ExitCode`.

    Where the command is to print JSON or YAML, so is what goes wrong: a document on standard error.
    """
    # gRPC's C core writes its own lines to stderr, beside the one sentence that we owe.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    output = asked_output(sys.argv[1:])
    try:
        # Buffered text is written within the try: a full disk shows at the flush at the latest.
        try:
            # Without `standalone_mode` typer raises what it would print, so that it can be printed as a
            # document.
            ended = app(prog_name="ctxcache", standalone_mode=output is Output.TABLE)
        finally:
            if sys.stdout:
                sys.stdout.flush()
        sys.exit(ended if isinstance(ended, int) else ExitCode.OK)
    except UsageFailure as error:
        sys.stderr.write(usage_document(error, output) + "\n")
        sys.exit(ExitCode.USAGE)
    except CacheError as error:
        _fail(error, output)
    except OSError as error:
        # An error of a file that was opened has its name; an error of what is printed has none.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or error.filename is not None:
            raise
        # Python would try to print the rest once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        _fail(FileFull(path="standard output", problem=os.strerror(error.errno)), output)


def _fail(error: CacheError, output: Output) -> NoReturn:
    text = f"ctxcache: {sentence(error)}" if output is Output.TABLE else error_document(error, output)
    # A log on a full disk takes no sentence; the exit code says it all the same.
    with suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
    sys.exit(exit_code_of(error))


if __name__ == "__main__":
    main()
