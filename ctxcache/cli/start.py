"""The program `ctxcache`: the command line, and one sentence where what it needs is not installed."""

import sys

OURS = ("ctxcache", "gpu_worker")
"""Packages of this distribution: one of theirs that is missing is a bug, not something to install."""
USAGE = 2
"""The exit code of wrong usage: `exit_codes` has them all, and may not be importable."""
INTERRUPTED = 130
"""The exit code of Ctrl-C, as shells have it."""


def main() -> None:
    """Run the command that was called."""
    try:
        # The imports take a while, in which Ctrl-C would be a traceback of theirs.
        from ctxcache.cli.main import main as run  # noqa: PLC0415  what it imports may be missing

        run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except ModuleNotFoundError as error:
        if (error.name or OURS[0]).partition(".")[0] in OURS:
            raise
        problem = f"`ctxcache {' '.join(sys.argv[1:2])}` needs {error.name}, which is not installed"
        sys.stderr.write(f"ctxcache: {problem}; install it with pip install 'ctxcache[server]'\n")
        sys.exit(USAGE)
