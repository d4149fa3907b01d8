"""`ctxcache token`: makes tokens, and writes down for a server what it has to know of them.

Asks no server.
"""

import os
from pathlib import Path
from typing import Annotated

import typer

from ctxcache.cli.documents import examples
from ctxcache.errors import InvalidConfiguration
from ctxcache.identity import ArenaGrant, Role, Token, digest_of, is_tenant, new_secret, read_tokens

app = typer.Typer()
tokens = typer.Typer(no_args_is_help=True, help="Make tokens for clients.")
app.add_typer(tokens, name="token")


@tokens.callback()
def _group() -> None:
    """Make tokens for clients."""


@tokens.command(
    "new",
    epilog=examples(
        "ctxcache token new engine-1 --hashes tokens --tenant chat --shared-memory",
        "ctxcache token new admin --hashes tokens --tenant default --role operator",
    ),
)
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What logs call it.")],
    file: Annotated[
        Path, typer.Option("--hashes", metavar="FILE", help="The server's `token_hashes`, to be added to.")
    ],
    tenant: Annotated[str, typer.Option("--tenant", metavar="NAME", help="Whose sessions it is for.")],
    role: Annotated[Role, typer.Option("--role", help="What it may ask for.")] = Role.USER,
    *,
    shared_memory: Annotated[
        bool, typer.Option("--shared-memory", help="It may map the arena, where all tenants' bytes lie.")
    ] = False,
    write_in_place: Annotated[
        bool, typer.Option("--write-in-place", help="It may write all over the arena, too.")
    ] = False,
) -> None:
    """Make a token, print it, and add its hash to the server's file.

    It is printed this once, and nowhere kept.
    """
    if not is_tenant(tenant):
        raise typer.BadParameter(f"{tenant!r} is no name of a tenant", param_hint="--tenant")
    if not name.isprintable() or " " in name or not name or name.startswith("#"):
        raise typer.BadParameter(f"{name!r} is not one word", param_hint="NAME")
    secret = new_secret()
    grant = ArenaGrant(tenant, role, shared_memory or write_in_place, write_in_place)
    _add(file, Token(name, digest_of(secret), grant))
    typer.echo(secret)


def _add(file: Path, token: Token) -> None:
    """Add a line, so that a server that reads meanwhile finds the file without it or with all of it."""
    if file.exists():
        # One that the server could not use is not to be added to.
        read_tokens(file)
    try:
        # O_APPEND and one write: two commands that add at once have a line each.
        opened = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with os.fdopen(opened, "r+b") as lines:
            is_ended = not lines.seek(0, os.SEEK_END) or _last_byte(lines.fileno()) == b"\n"
            lines.write((b"" if is_ended else b"\n") + f"{token.line()}\n".encode())
    except OSError as error:
        raise InvalidConfiguration(source=str(file), problem=error.strerror or str(error)) from error


def _last_byte(opened: int) -> bytes:
    return os.pread(opened, 1, os.fstat(opened).st_size - 1)
