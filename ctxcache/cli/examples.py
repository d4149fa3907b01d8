"""Examples: what a command's help ends with. A test runs each of them against a server."""

TITLE = "EXAMPLES"


def examples(*lines: str) -> str:
    """The end of a command's help; each line is one of the command line."""
    # An empty line between two: help runs the others together.
    return "\n\n".join((TITLE, *lines))
