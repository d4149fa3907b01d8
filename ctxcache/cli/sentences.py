"""What went wrong, in one sentence for people, with what to do about it where that is known.

Knows error classes and nothing of commands. Worst case: the error's own text on one line.
"""

from ctxcache import errors
from ctxcache.cli.units import human_size
from ctxcache.errors import CacheError

ADVICE: dict[type[CacheError], str] = {
    errors.Unavailable: "is a server running there? `ctxcache serve` starts one",
    errors.TlsFailed: "see --tls-ca, --tls-client-certificate and --tls-client-key",
    errors.DeadlineExceeded: "--timeout allows more",
    errors.GenerationMismatch: "look at it again before you change it",
    errors.WriteInProgress: "try again when its writer has finished",
    errors.CorruptMetadata: "`ctxcache rebuild` makes it anew from what is whole, --dry-run says what that is",
    errors.FormatTooNew: "install the version that wrote it, or a newer one",
    errors.FileAlreadyExists: "choose another name; only `export --force` replaces a file",
    errors.Unauthenticated: "--token-file or --tls-client-certificate say who you are",
    errors.PermissionDenied: "docs/operations.md says under Security whom a server lets in as what",
    errors.AddressUnusable: "choose another with --listen or --unix-socket",
}


def sentence(error: CacheError) -> str:
    """Return one line: what happened, what to do, and the stable reason in parentheses."""
    advice = ADVICE.get(type(error))
    text = " ".join(fact(error).split())
    return f"{text}{f'; {advice}' if advice else ''} ({error.reason})"


def fact(error: CacheError) -> str:
    """What happened, without what to do."""
    if (
        isinstance(error, errors.CapacityExceeded)
        and {"tier", "needed_bytes", "free_bytes"} <= error.facts.keys()
    ):
        needed, free = (human_size(int(error.facts[name])) for name in ("needed_bytes", "free_bytes"))
        return f"no room in {error.tier}: {needed} needed, {free} free"
    if isinstance(error, errors.Unavailable) and {"target", "problem"} <= error.facts.keys():
        if isinstance(error, errors.TlsFailed):
            return f"no TLS with {error.target}: {error.problem}"
        problem = str(error.problem)
        # gRPC names the address three times; the cause is what it says last.
        return f"no answer from {error.target}: {problem.rpartition(': ')[2]}"
    return str(error)
