"""`ctxcache worker`: the commands put together. Imports torch for none of them until one needs it."""

import typer

from gpu_worker.cli.layout import layout
from gpu_worker.cli.plan import plan
from gpu_worker.cli.profile import profile
from gpu_worker.cli.serve import serve
from gpu_worker.cli.stats import stats

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Serve engines, plan restorations, and measure what plans are made from.",
)
app.command("plan")(plan)
app.command("layout")(layout)
app.command("profile")(profile)
app.command("serve")(serve)
app.command("stats")(stats)
