"""What can go wrong in the demo alone. Exit codes are those of the classes that these derive from.

Knows nothing. They exist because the advice that fits a server of one's own does not fit here.
"""

from ctxcache.errors import Unavailable


class ModelUnavailable(Unavailable):
    """The demo's model is not on this machine and cannot be had; `problem` says what to do."""

    template = "{target}: {problem}"


class StoreDidNotStart(Unavailable):
    """The embedded store ended, or did not get ready in time; `problem` is what it said last."""

    template = "the embedded store did not start: {problem}"
