"""Operators' commands: `ctxcache quota`, `tier`, `lease`, `fault` and `drain`.

Worst case, of `drain`: clients give nothing back, or a device refuses. The command says so again and again,
until Ctrl-C.
"""

import enum
import errno
import sys
from typing import Annotated

import typer

from ctxcache.cli.call import CliCall, CtrlC, online, ssd_paths, tenant_names, watched
from ctxcache.cli.documents import examples
from ctxcache.cli.options import seconds
from ctxcache.cli.tables import drain_line
from ctxcache.cli.units import counted, parse_span, parsed
from ctxcache.client.convert import document
from ctxcache.client.types import DrainStatus, InjectedFaultKind
from ctxcache.errors import LeaseNotFound

app = typer.Typer()
quotas = typer.Typer(no_args_is_help=True, help="Look at tenants' shares and change them.")
app.add_typer(quotas, name="quota")


@quotas.command("list", epilog=examples("ctxcache quota list", "ctxcache quota list --output json"))
@watched
def list_quotas(call: CliCall) -> None:
    """Show what each tenant has, and what is its share."""
    with call.client() as client:
        call.show_list("tenants", client.admin.list_tenants(), None)


@quotas.command("set", epilog=examples("ctxcache quota set default --share 0.25 --limit 0.75"))
@online
def set_quota(
    call: CliCall,
    tenant: Annotated[
        str,
        typer.Argument(
            metavar="TENANT", help="One that has a share.", show_default=False, autocompletion=tenant_names
        ),
    ],
    share: Annotated[
        float | None,
        typer.Option("--share", metavar="PART", min=0, max=1, help="What others' need does not touch."),
    ] = None,
    limit: Annotated[
        float | None, typer.Option("--limit", metavar="PART", min=0, max=1, help="The most of SSD it keeps.")
    ] = None,
) -> None:
    """Change a tenant's share, until settings are read again: `tenant_shares` is where it lasts."""
    if share is None and limit is None:
        raise typer.BadParameter("give --share or --limit")
    with call.client() as client:
        call.show(client.admin.update_tenant(tenant, guaranteed=share, limit=limit))


tiers = typer.Typer(no_args_is_help=True, help="Look at tiers, and take SSD paths out of use.")
app.add_typer(tiers, name="tier")
Path = Annotated[
    str,
    typer.Argument(
        metavar="PATH", help="An SSD file or its directory.", show_default=False, autocompletion=ssd_paths
    ),
]


@tiers.command("list", epilog=examples("ctxcache tier list", "ctxcache tier list --output yaml"))
@watched
def list_tiers(call: CliCall) -> None:
    """List the arena and every SSD path: how full, how fragmented, and whether it takes writes."""
    with call.client() as client:
        call.show_list("paths", client.admin.stats().tiers, None)


@tiers.command("show", epilog=examples("ctxcache tier show DRAM", "ctxcache tier show /ssd"))
@watched
def show_tier(
    call: CliCall,
    path: Annotated[
        str,
        typer.Argument(
            metavar="TIER|PATH",
            help="DRAM, SSD, or an SSD file or its directory.",
            show_default=False,
            autocompletion=ssd_paths,
        ),
    ],
) -> None:
    """Show a tier, or one path of SSD."""
    with call.client() as client:
        tiers = list(client.admin.stats().tiers)
    shown = [tier for tier in tiers if path in (tier.path, tier.path.rpartition("/")[0])]
    # A tier's own name, too: SSD has a place for each of its directories.
    shown = shown or [tier for tier in tiers if path.upper() == tier.tier.name]
    if not shown:
        names = ", ".join([*dict.fromkeys(tier.tier.name for tier in tiers), *(tier.path for tier in tiers)])
        raise typer.BadParameter(f"{path!r} is none of {names}", param_hint="PATH")
    if len(shown) == 1:
        call.show(shown[0])
    else:
        call.show_list("paths", shown, None)


@tiers.command("rest", epilog=examples("ctxcache tier rest /ssd"))
@online
def rest_path(call: CliCall, path: Path) -> None:
    """Write nothing more to an SSD path; what lies there is read as before. A restart takes it back."""
    with call.client() as client:
        call.show(client.admin.update_path(path, resting=True))


@tiers.command("open", epilog=examples("ctxcache tier open /ssd"))
@online
def open_path(call: CliCall, path: Path) -> None:
    """Write to an SSD path again that was taken out of use."""
    with call.client() as client:
        call.show(client.admin.update_path(path, resting=False))


leases = typer.Typer(no_args_is_help=True, help="Look at leases, which keep bytes in memory, and end them.")
app.add_typer(leases, name="lease")
Id = Annotated[int, typer.Argument(metavar="LEASE", help="Its number.", min=1, show_default=False)]


@leases.command(
    "list", epilog=examples("ctxcache lease list", "ctxcache lease list --tenant default --older-than 60")
)
@watched
def list_leases(
    call: CliCall,
    tenant: Annotated[str, typer.Option("--tenant", metavar="TENANT", help="Only this one's.")] = "",
    older_than: Annotated[
        float,
        typer.Option("--older-than", metavar="TIME", parser=seconds(0), help="Only those held for longer."),
    ] = 0,
) -> None:
    """List leases, the oldest first."""
    with call.client() as client:
        held = [
            lease
            for lease in client.admin.list_leases(tenant=tenant)
            if (lease.age_ns or 0) / 1e9 >= older_than
        ]
    call.show_list("leases", held, None)


@leases.command("show", epilog=examples("ctxcache lease show 17"))
@watched
def show_lease(call: CliCall, lease: Id) -> None:
    """Show one lease."""
    with call.client() as client:
        lease_shown = next((held for held in client.admin.list_leases() if held.lease_id == lease), None)
    if lease_shown is None:
        raise LeaseNotFound(lease_id=lease)
    call.show(lease_shown)


@leases.command("revoke", epilog=examples("ctxcache lease revoke 17"))
@online
def revoke_lease(call: CliCall, lease: Id) -> None:
    """End a lease that its reader does not give back.

    A local client is cut off, and loses all its leases and reservations: only so it knows in time that what
    it reads may become another's. A stream fails.
    """
    with call.client() as client:
        ended = client.admin.revoke_lease(lease)
    call.show_facts({"ended_lease_count": ended}, f"{ended} leases ended")


faults = typer.Typer(no_args_is_help=True, help="Inject faults into a server for tests.")
app.add_typer(faults, name="fault")


class FaultWord(enum.StrEnum):
    """A fault, by its word on the command line."""

    READ_DELAY = "read-delay"
    WRITE_DELAY = "write-delay"
    READ_ERROR = "read-error"
    WRITE_ERROR = "write-error"
    BIT_FLIP = "bit-flip"
    COMMIT_DELAY = "commit-delay"

    @property
    def injected(self) -> InjectedFaultKind:
        """The kind that the server is asked for."""
        names = {FaultWord.BIT_FLIP: "SSD_READ_BIT_FLIP", FaultWord.COMMIT_DELAY: "COMMIT_DELAY"}
        return InjectedFaultKind[names.get(self, f"SSD_{self.name}")]


DELAYS = (FaultWord.READ_DELAY, FaultWord.WRITE_DELAY, FaultWord.COMMIT_DELAY)
ERRORS = (FaultWord.READ_ERROR, FaultWord.WRITE_ERROR)


@faults.command("list", epilog=examples("ctxcache fault list"))
@watched
def list_faults(call: CliCall) -> None:
    """List the faults that may strike yet."""
    with call.client() as client:
        call.show_list("faults", client.admin.list_faults(), None)


@faults.command(
    "inject",
    epilog=examples(
        "ctxcache fault inject read-delay --delay 0.05s --count 100 --duration 5min",
        "ctxcache fault inject write-error --errno ENOSPC --path /ssd",
        "ctxcache fault inject bit-flip",
    ),
)
@online
def inject(
    call: CliCall,
    kind: Annotated[FaultWord, typer.Argument(help="What goes wrong.", show_default=False)],
    delay: Annotated[
        str | None,
        typer.Option("--delay", metavar="TIME", help="Of delays: how much longer it takes, 10s at most."),
    ] = None,
    error: Annotated[
        str | None,
        typer.Option("--errno", metavar="NAME", help="Of errors: how it is refused.", show_default="EIO"),
    ] = None,
    path: Annotated[
        str,
        typer.Option(
            "--path",
            metavar="PATH",
            help="Only on this SSD file, or the one in this directory.",
            autocompletion=ssd_paths,
            show_default="every one",
        ),
    ] = "",
    count: Annotated[int, typer.Option("--count", metavar="N", help="How often it strikes.")] = 1,
    duration: Annotated[
        str, typer.Option("--duration", metavar="TIME", help="Until when, however seldom it has; 1h at most.")
    ] = "1min",
) -> None:
    """Let something go wrong, a number of times and for a time.

    The server refuses unless it was started with --fault-injection true, which is for tests alone.
    """
    if (delay is not None) != (kind in DELAYS):
        raise typer.BadParameter(f"{kind} {'needs' if kind in DELAYS else 'takes no'} --delay")
    if error is not None and kind not in ERRORS:
        raise typer.BadParameter(f"{kind} takes no --errno")
    with call.client() as client:
        call.show(
            client.admin.inject_fault(
                kind.injected,
                count=count,
                duration=parsed(parse_span, duration, "--duration"),
                path=path,
                delay=None if delay is None else parsed(parse_span, delay, "--delay"),
                error_number=parsed(_error_number, error or "EIO", "--errno") if kind in ERRORS else 0,
            )
        )


@faults.command("clear", epilog=examples("ctxcache fault clear"))
@online
def clear(call: CliCall) -> None:
    """Let no fault strike any more. A path that was fenced stays so until a restart."""
    with call.client() as client:
        count = client.admin.clear_faults()
    call.show_facts({"cleared_fault_count": count}, f"{counted(count, 'fault')} would have struck yet")


def _error_number(name: str) -> int:
    """Raises ValueError."""
    for number, known in errno.errorcode.items():
        if known == name.upper():
            return number
    raise ValueError(f"{name!r} is no error such as EIO or ENOSPC")


@app.command(
    "drain", epilog=examples("ctxcache drain", "ctxcache drain --no-wait", "ctxcache drain --undrain")
)
@online
def drain(
    call: CliCall,
    *,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until no client is left and all is on SSD.")
    ] = True,
    undrain: Annotated[bool, typer.Option("--undrain", help="Take work again.")] = False,
) -> None:
    """Take no more work, and write everything: before a node goes.

    Health and readiness say no at once. Ctrl-C ends the waiting, not the drain.
    """
    with call.client() as client:
        if undrain:
            client.admin.undrain()
            call.show_facts({"is_draining": False}, "work is taken again")
            return
        last: DrainStatus | None = None
        # The last status is shown, however the waiting ends.
        with CtrlC() as ctrl_c:
            for last in client.admin.drain():
                if not wait or ctrl_c.was_pressed:
                    break
                _report(last)
        if last is not None:
            _show(call, last)


def _report(status: DrainStatus) -> None:
    """Tell a person who waits at a terminal."""
    if sys.stderr.isatty():
        # The line is written over itself.
        sys.stderr.write(f"\r\x1b[K{drain_line(status)}" + ("\r\x1b[K" if status.is_done else ""))
        sys.stderr.flush()


def _show(call: CliCall, status: DrainStatus) -> None:
    call.show_facts(document(status), drain_line(status))
