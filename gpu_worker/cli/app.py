"""`ctxcache worker`: the commands put together. Imports torch for none of them until one needs it."""

import typer

from ctxcache.cli.documents import examples
from gpu_worker.cli.age import age, cost
from gpu_worker.cli.llamacpp import llamacpp
from gpu_worker.cli.plan import layout, plan, profile
from gpu_worker.cli.serve import serve, stats

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Serve engines, plan restorations, measure what plans are made from, and age idle sessions.",
)
app.command(
    "plan",
    epilog=examples(
        "ctxcache worker plan llama-2-13b --hardware a100-40gb",
        "ctxcache worker plan llama-3-8b --hardware a100-40gb --new 100 --explain",
    ),
)(plan)
app.command("layout", epilog=examples("ctxcache worker layout llama-2-7b --hardware a100-40gb"))(layout)
app.command("profile", epilog=examples("ctxcache worker profile /models/smollm2 --lengths 64,256"))(profile)
app.command(
    "serve",
    epilog=examples("ctxcache worker serve --store 127.0.0.1:7420 --metrics-listen 127.0.0.1:7423"),
)(serve)
app.command(
    "stats",
    epilog=examples(
        "ctxcache worker stats", "ctxcache worker stats --listen /run/ctxcache/worker.sock --json"
    ),
)(stats)
app.command(
    "age",
    epilog=examples(
        "ctxcache worker age /models/smollm2 --dry-run",
        "ctxcache worker age /models/smollm2 --every 600 --metrics-listen 127.0.0.1:7424",
    ),
)(age)
app.command("cost", epilog=examples("ctxcache worker cost /models/smollm2 chat-17 --json"))(cost)
app.command(
    "llamacpp",
    epilog=examples(
        "ctxcache worker llamacpp smollm2.gguf",
        "ctxcache worker llamacpp smollm2.gguf --slots 2 --ctx-size 16384 --param cpuparams.n_threads=8",
    ),
)(llamacpp)
