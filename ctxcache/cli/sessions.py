"""`ctxcache session`, `model` and `hint`: what operators ask of sessions and models, and do to sessions.

Each command is one call to the server, `delete` one for each session (`selecting`); the server decides what
is allowed. A command that changes a session prints the session as it is afterwards. A NAME is `ID` or
`sessions/ID`. Engines register models; operators only look at them, and have those forgotten that no session
uses. A hint is what engines say, said by hand.
"""

import enum
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from ctxcache.cli.call import CliCall, model_names, of_tenant, session_names, watched, watched_of_tenant
from ctxcache.cli.documents import Plain, examples
from ctxcache.cli.selecting import PAGE_SIZE, Deletion, Selection, Tally, named
from ctxcache.cli.units import (
    check_one_of,
    counted,
    model_name,
    parse_instant,
    parse_labels,
    parse_range,
    parse_span,
    parsed,
    session_name,
)
from ctxcache.client import CallerModel, Client
from ctxcache.client.convert import document
from ctxcache.client.types import HintResult, SessionInfo
from ctxcache.errors import CacheError
from ctxcache.settings.knobs.knob import parse_size_bytes

app = typer.Typer()
sessions = typer.Typer(no_args_is_help=True, help="Look at sessions and change them.")
app.add_typer(sessions, name="session")

LIST_LIMIT = 50
LONG_AGO = datetime(1970, 1, 2, tzinfo=UTC)
"""Before the present of any server, however far its clock is from ours."""

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="ID or sessions/ID.", show_default=False, autocompletion=session_names
    ),
]
IfGeneration = Annotated[
    int | None,
    typer.Option("--if-generation", metavar="G", help="Only if the session is at this generation."),
]


Prefix = Annotated[str, typer.Option("--prefix", metavar="TEXT", help="Only IDs that begin so.")]
Idle = Annotated[
    str, typer.Option("--idle", metavar="TIME", help="Only those not accessed for so long: 15min, 2h.")
]
OlderThan = Annotated[
    str, typer.Option("--older-than", metavar="TIME", help="Only those made so long ago: 12h, 30d.")
]
WithLabel = Annotated[
    list[str] | None,
    typer.Option("--label", metavar="KEY=VALUE", help="Only those with this label; repeat for more."),
]


@sessions.command(
    "create",
    epilog=examples("ctxcache session create chat-99 --model llama --label user=4711 --ttl 7d"),
)
@of_tenant
def create_session(
    call: CliCall,
    name: Name,
    *,
    model: Annotated[
        str,
        typer.Option(
            "--model", metavar="MODEL", help="Its model.", autocompletion=model_names, show_default=False
        ),
    ],
    label: Annotated[
        list[str] | None,
        typer.Option("--label", metavar="KEY=VALUE", help="A label of it, up to 8; repeat for more."),
    ] = None,
    ttl: Annotated[
        str | None,
        typer.Option("--ttl", metavar="TIME", help="How long it lives after each access: 15min, 7d."),
    ] = None,
) -> None:
    """Make an empty session, with all streams of its model."""
    labels = parsed(parse_labels, label or (), "--label")
    span = parsed(parse_span, ttl, "--ttl") if ttl is not None else None
    with call.client() as client:
        found = CallerModel(client.models.get(model_name(model)).spec)
        session_id = name.removeprefix("sessions/")
        call.show(client.sessions.create(found, id=session_id, labels=labels, ttl=span).info)


@sessions.command(
    "list",
    epilog=examples(
        "ctxcache session list",
        "ctxcache session list --idle 2h --larger 1MiB",
        "ctxcache session list --prefix chat- --output json",
        "ctxcache session list --label user=4711",
    ),
)
@watched_of_tenant
def list_sessions(
    call: CliCall,
    model: Annotated[
        str,
        typer.Option("--model", metavar="MODEL", help="Only this model's.", autocompletion=model_names),
    ] = "",
    prefix: Prefix = "",
    idle: Idle = "0",
    older_than: OlderThan = "0",
    label: WithLabel = None,
    larger: Annotated[
        str,
        typer.Option("--larger", metavar="SIZE", help="Only those that take more, in both tiers: 100MiB."),
    ] = "0",
    pinned: Annotated[
        bool | None, typer.Option("--pinned/--not-pinned", help="Only those, or only the others.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Most sessions to list.")] = LIST_LIMIT,
    all_: Annotated[bool, typer.Option("--all", help="List all of them.")] = False,  # noqa: FBT002  a flag
) -> None:
    """List sessions by name."""
    selection = Selection(
        prefix=prefix,
        model=model_name(model) if model else "",
        idle=parsed(parse_span, idle, "--idle"),
        age=parsed(parse_span, older_than, "--older-than"),
        labels=parsed(parse_labels, label or (), "--label"),
        larger_bytes=0 if larger == "0" else parsed(parse_size_bytes, larger, "--larger"),
        is_pinned=pinned,
    )
    # Small pages of a filtered list would cost a call for a few names each.
    page_size = PAGE_SIZE if all_ or selection.is_filtered else min(limit + 1, PAGE_SIZE)
    with call.client() as client:
        call.show_list("sessions", selection.sessions(client, page_size), None if all_ else limit)


@sessions.command("show", epilog=examples("ctxcache session show chat-17"))
@watched_of_tenant
def show_session(call: CliCall, name: Name) -> None:
    """Show one session."""
    with call.client() as client:
        call.show(client.sessions.get(session_name(name)))


@sessions.command(
    "truncate",
    epilog=examples(
        "ctxcache session truncate chat-17 --keep-recent 64",
        "ctxcache session truncate chat-17 --drop 10:20 --drop 30:40",
        "ctxcache session truncate chat-17 --keep-first 32",
    ),
)
@of_tenant
def truncate_session(
    call: CliCall,
    name: Name,
    *,
    keep_recent: Annotated[
        int | None,
        typer.Option("--keep-recent", metavar="N", min=0, help="Keep the newest N tokens and the sinks."),
    ] = None,
    sinks: Annotated[
        int | None,
        typer.Option(
            "--sinks", metavar="N", min=0, help="First tokens that --keep-recent keeps too.", show_default="4"
        ),
    ] = None,
    keep_first: Annotated[
        int | None, typer.Option("--keep-first", metavar="N", min=0, help="Keep the first N tokens.")
    ] = None,
    drop: Annotated[
        list[str] | None,
        typer.Option("--drop", metavar="A:B", help="Drop tokens A to B, B excluded; repeat for more."),
    ] = None,
    if_generation: IfGeneration = None,
) -> None:
    """Drop tokens of a session, without touching what stays."""
    check_one_of(keep_recent=keep_recent is not None, keep_first=keep_first is not None, drop=bool(drop))
    if sinks is not None and keep_recent is None:
        raise typer.BadParameter("--sinks goes with --keep-recent")
    ranges = [parsed(parse_range, text, "--drop") for text in drop or ()]
    target = session_name(name)
    with call.client() as client:
        if keep_recent is not None:
            session = client.sessions.open(target).keep_recent(
                keep_recent, sink_token_count=sinks, if_generation_match=if_generation
            )
        elif keep_first is not None:
            session = client.sessions.open(target).keep_first(keep_first, if_generation_match=if_generation)
        else:
            session = client.sessions.open(target).drop_ranges(ranges, if_generation_match=if_generation)
    call.show(session)


@sessions.command("fork", epilog=examples("ctxcache session fork chat-17 --as chat-18 --tokens 8"))
@of_tenant
def fork_session(
    call: CliCall,
    name: Name,
    as_: Annotated[
        str, typer.Option("--as", metavar="ID", help="Id of the new session; unset, the server's choice.")
    ] = "",
    tokens: Annotated[
        int | None,
        typer.Option("--tokens", metavar="N", min=0, help="Share the first N tokens.", show_default="all"),
    ] = None,
    if_generation: IfGeneration = None,
) -> None:
    """Make a session that shares this one's first tokens; nothing is copied."""
    new_id = as_.removeprefix("sessions/")
    with call.client() as client:
        source = client.sessions.open(session_name(name))
        made = source.fork(id=new_id, token_count=tokens, if_generation_match=if_generation)
        call.show(made.info)


@sessions.command("pin", epilog=examples("ctxcache session pin chat-17"))
@of_tenant
def pin_session(call: CliCall, name: Name) -> None:
    """Hold a session against eviction. It expires all the same."""
    with call.client() as client:
        call.show(client.sessions.open(session_name(name)).update(is_pinned=True))


@sessions.command("unpin", epilog=examples("ctxcache session unpin chat-17"))
@of_tenant
def unpin_session(call: CliCall, name: Name) -> None:
    """Let a session be evicted again."""
    with call.client() as client:
        call.show(client.sessions.open(session_name(name)).update(is_pinned=False))


@sessions.command("copies", epilog=examples("ctxcache session copies chat-17 2"))
@of_tenant
def copy_session(
    call: CliCall,
    name: Name,
    copies: Annotated[int, typer.Argument(metavar="N", min=1, max=2, help="1 or 2 SSD directories.")],
) -> None:
    """Keep each segment of a session on so many SSD directories."""
    with call.client() as client:
        call.show(client.sessions.open(session_name(name)).update(copies=copies))


@sessions.command("touch", epilog=examples("ctxcache session touch chat-17"))
@of_tenant
def touch_session(call: CliCall, name: Name) -> None:
    """Count an access: a sliding expiry begins anew, and the session is the last to leave."""
    with call.client() as client:
        call.show(client.sessions.open(session_name(name)).update())


@sessions.command("evict", epilog=examples("ctxcache session evict chat-17"))
@of_tenant
def evict_session(call: CliCall, name: Name) -> None:
    """Give up a session as if its room were needed: it is gone, pinned or not, and `why-miss` says so."""
    target = session_name(name)
    with call.client() as client:
        client.admin.evict_session(target)
    call.show_facts({"evicted": [target]}, f"evicted {target}")


@sessions.command(
    "expire",
    epilog=examples(
        "ctxcache session expire chat-17 --ttl 2h",
        "ctxcache session expire chat-17 --at 2030-01-31T12:00:00Z",
    ),
)
@of_tenant
def expire_session(
    call: CliCall,
    name: Name,
    now: Annotated[bool, typer.Option("--now", help="At once.")] = False,  # noqa: FBT002  a flag
    ttl: Annotated[
        str | None,
        typer.Option("--ttl", metavar="TIME", help="This long after each access: 90s, 15min, 2h, 7d."),
    ] = None,
    at: Annotated[
        str | None, typer.Option("--at", metavar="RFC3339", help="At this instant: 2030-01-31T12:00:00Z.")
    ] = None,
) -> None:
    """Say when a session expires."""
    check_one_of(now=now, ttl=ttl is not None, at=at is not None)
    span = parsed(parse_span, ttl, "--ttl") if ttl is not None else None
    instant = parsed(parse_instant, at, "--at") if at is not None else None
    with call.client() as client:
        call.show(
            client.sessions.open(session_name(name)).update(
                ttl=span, expire_time=LONG_AGO if now else instant
            )
        )


@sessions.command("flush", epilog=examples("ctxcache session flush chat-17"))
@of_tenant
def flush_session(call: CliCall, name: Name) -> None:
    """Make every token of a session durable on disk."""
    with call.client() as client:
        call.show(client.sessions.open(session_name(name)).flush())


@sessions.command("demote", epilog=examples("ctxcache session demote chat-17"))
@of_tenant
def demote_session(call: CliCall, name: Name) -> None:
    """Make a session durable and take it out of memory; the next reader brings it back."""
    with call.client() as client:
        call.show(client.admin.demote_session(session_name(name)))


@sessions.command(
    "delete",
    epilog=examples(
        "ctxcache session delete chat-17 --yes",
        "ctxcache session delete --label user=4711 --dry-run",
        "ctxcache session delete --prefix user-4711- --yes",
        "ctxcache session delete --older-than 30d --idle 7d --yes --output json",
    ),
)
@of_tenant
def delete_sessions(
    call: CliCall,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME...]",
            help="IDs or sessions/IDs.",
            show_default=False,
            autocompletion=session_names,
        ),
    ] = None,
    *,
    prefix: Prefix = "",
    idle: Idle = "0",
    older_than: OlderThan = "0",
    label: WithLabel = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete sessions: those named, or all of which every given option is true.

    Asks first where a person can answer; without names it needs --yes elsewhere. Goes on behind a session
    that cannot be deleted, and ends with the first failure's exit code. After an interruption, run it again.

    A deleted session is out of every answer at once. Its bytes stay in the SSD files until others are
    written over them, its name in RocksDB's and the catalog's files until they are written anew: see
    "What deletion leaves" in docs/security.md.
    """
    selection = Selection(
        prefix=prefix,
        idle=parsed(parse_span, idle, "--idle"),
        age=parsed(parse_span, older_than, "--older-than"),
        labels=parsed(parse_labels, label or (), "--label"),
    )
    if not names and selection.is_all and not call.tenant:
        raise typer.BadParameter(
            "name sessions, or say which: --prefix, --label, --older-than, --idle, --tenant"
        )
    can_ask = sys.stdin.isatty()
    if not (names or yes or dry_run or can_ask):
        raise typer.BadParameter(
            "goes with names where nobody can answer: give --yes", param_hint="selection"
        )
    with call.client() as client:
        found, unknown = named(client, [session_name(name) for name in names or ()], selection)

        def wanted() -> Iterator[SessionInfo]:
            return iter(found) if names else selection.sessions(client)

        tally = Tally()
        if dry_run or (can_ask and not yes):
            for session in wanted():
                tally.add(session)
        if dry_run:
            _show_deleted(call, tally, unknown, is_trial=True)
        else:
            if can_ask and not yes and tally.names:
                few = f": {', '.join(tally.names)}" if len(tally.names) <= NAMES_ASKED else ""
                typer.confirm(f"Delete {tally.text()}{few}?", abort=True, err=True)
            deletion = Deletion(client, selection, failures=unknown)
            with _progress(len(tally.names)) as deletion.on_step:
                deletion.run(wanted(), lambda: _show_deleted(call, deletion.deleted, unknown, is_trial=False))
    if unknown:
        sys.stdout.flush()
        raise next(iter(unknown.values()))


NAMES_ASKED = 3
"""Up to so many names are in the question."""


def _show_deleted(call: CliCall, tally: Tally, failures: Mapping[str, CacheError], *, is_trial: bool) -> None:
    names = sorted(tally.names)
    facts: dict[str, Plain] = {
        "is_dry_run": is_trial,
        "deleted": [] if is_trial else [*names],
        "would_delete": [*names] if is_trial else [],
        **tally.facts(),
        "failed": [{"name": name, "reason": error.reason} for name, error in failures.items()],
    }
    lines = [f"{'would delete' if is_trial else 'deleted'} {tally.text()}"]
    if len(tally.names) <= NAMES_ASKED:
        lines = [f"{'would delete' if is_trial else 'deleted'} {name}" for name in names] or lines
    lines += [f"not deleted: {name}: {error}" for name, error in failures.items()]
    call.show_facts(facts, "\n".join(lines))


@contextmanager
def _progress(session_count: int) -> Iterator[Callable[[Tally], None]]:
    """Say how far a deletion is, where standard error is a terminal. 0 sessions: nobody has counted them."""
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bars:
        task = bars.add_task("deleting", total=session_count or None)

        def step(tally: Tally) -> None:
            done = len(tally.names)
            bars.update(task, completed=done, description=f"deleted {counted(done, 'session')}")

        yield step


models = typer.Typer(no_args_is_help=True, help="Look at registered models.")
app.add_typer(models, name="model")
ModelName = Annotated[
    str,
    typer.Argument(metavar="NAME", help="ID or models/ID.", show_default=False, autocompletion=model_names),
]


@models.command("list", epilog=examples("ctxcache model list", "ctxcache model list --output yaml"))
@watched_of_tenant
def list_models(call: CliCall) -> None:
    """List models by name."""
    with call.client() as client:
        call.show_list("models", client.models.list(), None)


@models.command("show", epilog=examples("ctxcache model show llama"))
@watched_of_tenant
def show_model(call: CliCall, name: ModelName) -> None:
    """Show one model."""
    with call.client() as client:
        call.show(client.models.get(model_name(name)))


@models.command("delete", epilog=examples("ctxcache model delete llama"))
@of_tenant
def delete_model(call: CliCall, name: ModelName) -> None:
    """Forget a model that no session is of."""
    target = model_name(name)
    with call.client() as client:
        client.admin.delete_model(target)
    call.show_facts({"deleted": [target]}, f"deleted {target}")


@models.command(
    "forget",
    epilog=examples(
        "ctxcache model forget llama --weights step-100",
        "ctxcache model forget llama --weights step-100 --dry-run",
    ),
)
@of_tenant
def forget_model(
    call: CliCall,
    name: ModelName,
    *,
    weights: Annotated[
        str,
        typer.Option(
            help="The version, as the engine was told it, or a whole weights_digest.",
            metavar="VERSION",
            show_default=False,
        ),
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Forget sessions and blocks of one version of a model's weights. Asks where a person can answer."""
    target = model_name(name)
    if not yes and not dry_run and sys.stdin.isatty():
        typer.confirm(f"Forget all of {target} with weights {weights}?", abort=True, err=True)
    with call.client() as client:
        gone = client.models.forget(target, weights, is_trial=dry_run)
    verb = "would forget" if dry_run else "forgot"
    sessions, tokens = counted(gone.session_count, "session"), counted(gone.token_count, "token")
    counts = f"{sessions} of {tokens} and {counted(gone.block_count, 'block')}"
    call.show_facts(document(gone), f"{verb} {counts} of {', '.join(gone.models)}")


hints = typer.Typer(no_args_is_help=True, help="Give hints, and look at engines' queues.")
app.add_typer(hints, name="hint")


class HintWord(enum.StrEnum):
    """A hint, by its word on the command line."""

    SHARE = "share"
    PREFETCH = "prefetch"
    DEMOTE = "demote"
    PIN = "pin"
    RETAIN = "retain"
    RELEASE = "release"
    EXPECT = "expect"


TTL_KINDS = (HintWord.PIN, HintWord.RETAIN)


@hints.command(
    "send",
    epilog=examples(
        "ctxcache hint send prefetch chat-17",
        "ctxcache hint send pin chat-17 --ttl 10min",
        "ctxcache hint send expect chat-17 --ttl 5min",
    ),
)
@of_tenant
def send_hint(
    call: CliCall,
    kind: Annotated[HintWord, typer.Argument(help="What to say.", show_default=False)],
    name: Name,
    ttl: Annotated[
        str | None, typer.Option("--ttl", metavar="TIME", help="For how long; `expect`: when it returns.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", metavar="N", min=0, help="Of `share`, `prefetch`: the first N.")
    ] = None,
) -> None:
    """Say what is to come of a session. The server may take less, or nothing: it answers what came of it."""
    if kind in TTL_KINDS and ttl is None:
        raise typer.BadParameter(f"{kind} needs --ttl")
    span = None if ttl is None else parsed(parse_span, ttl, "--ttl")
    with call.client() as client:
        call.show_list("hints", [_send(client, kind, session_name(name), span, tokens)], None)


@hints.command("queues", epilog=examples("ctxcache hint queues"))
@watched
def list_queues(call: CliCall) -> None:
    """List the engines that say what waits."""
    with call.client() as client:
        call.show_list("engines", client.admin.list_engines(), None)


def _send(
    client: Client, kind: HintWord, name: str, span: timedelta | None, tokens: int | None
) -> HintResult:
    sent = {
        HintWord.SHARE: lambda: client.hints.share(name, token_count=tokens),
        HintWord.PREFETCH: lambda: client.hints.prefetch(name, token_count=tokens, ttl=span),
        HintWord.DEMOTE: lambda: client.hints.demote(name),
        HintWord.PIN: lambda: client.hints.pin(name, ttl=span or timedelta()),
        HintWord.RETAIN: lambda: client.hints.retain(name, ttl=span or timedelta()),
        HintWord.RELEASE: lambda: client.hints.release(name),
        HintWord.EXPECT: lambda: client.hints.expect(name, span),
    }
    return sent[kind]()
