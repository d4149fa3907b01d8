"""Commands whose options come from a table: a signature made from parts, for typer to read."""

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, get_type_hints

Options = TypeVar("Options")


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


def taking(kind: type[Options]) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Decorate a command whose parameters are the fields of `kind`, a dataclass of Annotated."""
    if not dataclasses.is_dataclass(kind):
        raise TypeError(kind)
    hints = get_type_hints(kind, include_extras=True)
    fields = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(kind)
    ]

    def decorated(function: Callable[[Options], None]) -> Callable[..., None]:
        return with_signature(
            lambda **given: function(kind(**given)), fields, name=function.__name__, doc=function.__doc__
        )

    return decorated
