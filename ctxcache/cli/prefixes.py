"""`ctxcache prefix`: what sessions have of a prompt, why not more, and which prefixes they share.

A FILE has a prompt's token ids as one JSON list; `-` is standard input. Nothing here changes anything.
"""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from ctxcache.cli.call import CliCall, model_names, online, session_names, watched
from ctxcache.cli.documents import examples
from ctxcache.cli.units import model_name, parsed, session_name
from ctxcache.client.convert import document
from ctxcache.client.types import PrefixMatch
from ctxcache.format.streams import Content

app = typer.Typer()
prefixes = typer.Typer(no_args_is_help=True, help="Look for prompts by tokens, and at what sessions share.")
app.add_typer(prefixes, name="prefix")

LIST_LIMIT = 50
REASONS = {
    "NOT_STORED": "no session of this model and layout has the next 64 tokens",
    "CUT": "a session has the next 64 tokens, and lost tokens before them",
    "SHORT": "fewer than 64 tokens are left, and only whole runs of 64 are found",
    "": "these are all that were asked for",
}
Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="ID or models/ID.", show_default=False, autocompletion=model_names),
]
File = Annotated[
    str,
    typer.Argument(metavar="[FILE]", help="Token ids, a JSON list; - is standard input.", show_default=False),
]
Keys = Annotated[
    list[str] | None,
    typer.Option(
        "--key",
        metavar="HEX",
        help="In the place of FILE: the key of the first 64 tokens; repeat for the next ones.",
    ),
]
Like = Annotated[
    str,
    typer.Option(
        "--like",
        metavar="NAME",
        help="Sessions of the same streams and salt as this one; without it, all streams and no salt.",
        show_default=False,
        autocompletion=session_names,
    ),
]
Contents = Annotated[
    list[str] | None,
    typer.Option(
        "--content",
        metavar="BEGIN:END:HEX",
        help="What lies behind tokens BEGIN to END - 1, by its digest; repeat for the next ones.",
    ),
]


@prefixes.command(
    "match",
    epilog=examples(
        "ctxcache prefix match tiny prompt.json",
        "ctxcache prefix match tiny prompt.json --like chat-17",
        f"ctxcache prefix match tiny prompt.json --content 5:37:{'5a' * 32}",
    ),
)
@online
def match(
    call: CliCall,
    model: Model,
    file: File = "",
    *,
    key: Keys = None,
    content: Contents = None,
    like: Like = "",
) -> None:
    """Say how many of a prompt's first tokens some session has."""
    call.show(_found(call, model, file, key, content, like))


@prefixes.command(
    "why-miss",
    epilog=examples(
        "ctxcache prefix why-miss tiny prompt.json", f"ctxcache prefix why-miss tiny --key {'5a' * 32}"
    ),
)
@online
def why_miss(
    call: CliCall,
    model: Model,
    file: File = "",
    *,
    key: Keys = None,
    content: Contents = None,
    like: Like = "",
) -> None:
    """Say why not more of a prompt's first tokens were found."""
    found = _found(call, model, file, key, content, like)
    reason = REASONS.get(found.reason, found.reason)
    call.show_facts(document(found), f"{found.token_count} tokens are there: {reason}.")


@prefixes.command(
    "top", epilog=examples("ctxcache prefix top", "ctxcache prefix top --limit 10 --output json")
)
@watched
def top(
    call: CliCall,
    limit: Annotated[
        int, typer.Option("--limit", min=1, max=1000, help="Most prefixes to list.")
    ] = LIST_LIMIT,
) -> None:
    """Show prefixes that several sessions share, what saves most first."""
    with call.client() as client:
        call.show_list("prefixes", client.prefixes.most_shared(limit=limit), None)


def _found(
    call: CliCall, model: str, file: str, key: list[str] | None, content: list[str] | None, like: str
) -> PrefixMatch:
    if bool(file) == bool(key):
        raise typer.BadParameter("give a FILE, or --key")
    token_ids = parsed(_token_ids, file, "FILE") if file else []
    keys = [parsed(_digest, one, "--key") for one in key or ()]
    contents = [parsed(_content, one, "--content") for one in content or ()]
    with call.client() as client:
        other = client.sessions.get(session_name(like)) if like else None
        return client.prefixes.match(
            client.models.get(model_name(model)),
            token_ids,
            keys=keys,
            contents=contents,
            # A key was made with its salt.
            salt=other.salt if other and file else b"",
            layout=other.streams() if other else None,
        )


def _digest(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not hexadecimal") from error


def _content(text: str) -> Content:
    try:
        begin, end, digest = text.split(":")
        return Content(int(begin), int(end), bytes.fromhex(digest))
    except ValueError as error:
        raise ValueError(f"{text!r} is not BEGIN:END:HEX") from error


def _token_ids(file: str) -> list[int]:
    """Raises ValueError for what is no list of integers."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text()
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from error
    try:
        token_ids = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(token_ids, list) or not token_ids or not all(type(one) is int for one in token_ids):
        raise ValueError(f"{file} is no JSON list of integers, or an empty one")
    return token_ids
