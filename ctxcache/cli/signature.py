"""Commands whose options come from a table: a signature made from parts, for typer to read."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def option(name: str, annotation: Any) -> inspect.Parameter:
    """Return a parameter that is None unless it is given. `annotation` is typer's, an Annotated."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def with_signature(
    function: Callable[..., None],
    parameters: Iterable[inspect.Parameter],
    *,
    name: str,
    doc: str | None,
    hints: Mapping[str, Any] | None = None,
) -> Callable[..., None]:
    """Return `function` as typer shall see it; it is called with every parameter by its name."""

    def command(**given: Any) -> None:  # Any: typer has checked each against the signature
        function(**given)

    shown = list(parameters)
    command.__name__, command.__doc__ = name, doc
    command.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]  # inspect looks for it
    command.__annotations__ = {p.name: (hints or {}).get(p.name, p.annotation) for p in shown}
    return command
