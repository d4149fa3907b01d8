"""`ctxcache rebuild`: metadata made anew from the SSD directories, while no server runs.

Takes the options of `serve`, to speak of the same directories. Worst case: there is nothing to make it
from, which is one sentence and an exit code; what was there stays beside the new in any case.
"""

from dataclasses import asdict
from importlib.metadata import version
from typing import Annotated, Any

import typer

from ctxcache.cli.documents import Plain, examples
from ctxcache.cli.options import option, shared_of
from ctxcache.cli.settings import load_settings, taking_settings
from ctxcache.cli.units import counted, human_size
from ctxcache.runtime.files import keep_private
from ctxcache.storage.opening import ssd_directories_of
from ctxcache.storage.rebuild import Rebuilt
from ctxcache.storage.rebuild import rebuild as make_anew

_DRY_RUN = Annotated[bool | None, typer.Option("--dry-run", help="Say what would come back; change nothing.")]


app = typer.Typer()


@app.command(
    "rebuild",
    epilog=examples("ctxcache rebuild --dry-run", "ctxcache rebuild --data-directory /var/lib/ctxcache"),
)
@taking_settings(option("dry_run", _DRY_RUN))
def rebuild(context: typer.Context, **given: Any) -> None:
    """Make damaged or deleted metadata anew from the SSD directories, while no server runs.

    The old metadata is kept beside it. Exits with 0 also when some sessions end earlier than they did.
    """
    is_dry_run = bool(given.pop("dry_run"))
    settings = load_settings(given)
    shared = shared_of(context, given)
    # New files belong to the server, with any umask.
    keep_private()
    rebuilt = make_anew(
        settings.data_directory,
        ssd_directories_of(settings),
        created_by=f"ctxcache {version('ctxcache')}",
        is_dry_run=is_dry_run,
    )
    facts: dict[str, Plain] = {
        **asdict(rebuilt),
        "is_complete": rebuilt.is_complete,
        "is_dry_run": is_dry_run,
    }
    shared.show_facts(facts, _text(rebuilt, is_dry_run=is_dry_run))


def _text(rebuilt: Rebuilt, *, is_dry_run: bool) -> str:
    verb = "would bring" if is_dry_run else "brought"
    kept = f"{counted(rebuilt.token_count, 'token')} in {counted(rebuilt.segment_count, 'segment')}"
    lost = (
        f"{counted(rebuilt.lost_token_count, 'token')} and {counted(rebuilt.lost_segment_count, 'segment')}"
    )
    lines = [
        f"{verb} back {counted(rebuilt.session_count, 'session')} with {kept}, as of commit {rebuilt.commit}",
        f"  {lost} are not there any more",
        f"  {human_size(rebuilt.scanned_bytes)} scanned in {rebuilt.scan_duration_s:.1f} s",
    ]
    if rebuilt.missing_commit_count:
        lines.append(f"  {rebuilt.missing_commit_count} commits that were on disk are unknown")
    return "\n".join([*lines, *(f"  {problem}" for problem in rebuilt.problems)])
