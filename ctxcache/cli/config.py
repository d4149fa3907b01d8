"""`ctxcache config`: the server's settings before it runs, and while it does."""

import json
from typing import Annotated, Any

import typer

from ctxcache.cli.call import CliCall, online
from ctxcache.cli.documents import Plain, examples
from ctxcache.cli.options import option, shared_of
from ctxcache.cli.settings import settings_of, taking_settings
from ctxcache.settings.config import Settings
from ctxcache.settings.knobs.reference import toml

EffectiveOption = Annotated[
    bool | None, typer.Option("--effective", help="Those at their default, too.", show_default=False)
]
app = typer.Typer()
settings_app = typer.Typer(no_args_is_help=True, help="Look at settings, and change them.")
app.add_typer(settings_app, name="config")


@settings_app.command("check", epilog=examples("ctxcache config check --config ctxcache.toml"))
@taking_settings()
def check(context: typer.Context, **given: Any) -> None:
    """Say whether a server would start with these settings, as `serve` takes them.

    Looks at the settings alone; `ctxcache doctor` looks at the machine too.
    """
    shared = shared_of(context, given)
    settings, sources = settings_of(given)
    changed = sum(source != "default" for source in sources.values())
    warnings: list[Plain] = [*doubts(settings)]
    # Warnings are no failure: a server would start, and the exit code says that.
    text = "\n".join(
        [*(f"warning: {doubt}" for doubt in warnings), f"ok: {changed} of {len(sources)} settings are given"]
    )
    shared.show_facts({"is_valid": True, "given_count": changed, "warnings": warnings}, text)


@settings_app.command("show", epilog=examples("ctxcache config show", "ctxcache config show --effective"))
@taking_settings(option("effective", EffectiveOption))
def show(context: typer.Context, *, effective: bool | None, **given: Any) -> None:
    """Show the settings that are given, and where each comes from."""
    shared = shared_of(context, given)
    settings, sources = settings_of(given)
    plain: dict[str, Plain] = json.loads(settings.model_dump_json())
    shown = [name for name, source in sources.items() if effective or source != "default"]
    facts: dict[str, Plain] = {name: {"value": plain[name], "source": sources[name]} for name in shown}
    width = max(map(len, shown), default=0)
    lines = (f"{name:{width}} = {json.dumps(plain[name])}  # {sources[name]}" for name in shown)
    shared.show_facts(facts, "\n".join(lines) or "every setting is at its default")


@settings_app.command("reference", epilog=examples("ctxcache config reference"))
def reference() -> None:
    """Print a TOML file of all settings, with what each means, to start from."""
    typer.echo(toml(), nl=False)


@settings_app.command("running", epilog=examples("ctxcache config running --output yaml"))
@online
def running(call: CliCall) -> None:
    """Show the settings that a running server has; those marked live change while it runs."""
    with call.client() as client:
        settings = client.admin.settings()
    facts: dict[str, Plain] = {
        s.name: {"value": json.loads(s.value_json), "can_reload": s.can_reload} for s in settings
    }
    width = max(len(s.name) for s in settings)
    lines = (f"{s.name:{width}} = {s.value_json}{'  # live' if s.can_reload else ''}" for s in settings)
    call.show_facts(facts, "\n".join(lines))


@settings_app.command("reload", epilog=examples("ctxcache config reload"))
@online
def reload(call: CliCall) -> None:
    """Have a running server read its settings again, all or nothing, and say what has changed."""
    with call.client() as client:
        settings = client.admin.reload_settings()
    facts: dict[str, Plain] = {"changed": list(settings.changed), "pending": list(settings.pending)}
    lines = [
        *(f"changed: {name}" for name in settings.changed),
        *(f"after a restart: {name}" for name in settings.pending),
    ]
    call.show_facts(facts, "\n".join(lines) or "nothing has changed")


def doubts(settings: Settings) -> list[str]:
    """Settings that are allowed and seldom meant."""
    problems = []
    if settings.insecure_listen:
        problems.append("insecure_listen: whoever reaches the port may do everything")
    if settings.fault_injection:
        problems.append("fault_injection: operators may make devices fail, which is for tests alone")
    if settings.tls_certificate and not (settings.tls_client_ca or settings.token_hashes):
        problems.append("tls_client_ca is not set: clients on TCP show no certificate")
    if settings.tail_age_s == 0:
        problems.append("tail_age_s is 0: a crash takes every growing segment that nobody asked to flush")
    return problems
