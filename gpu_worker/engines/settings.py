"""Settings of an adapter, read from the engine's own configuration, and the client of the store they name."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, Self

from pydantic import Field, TypeAdapter, ValidationError

from ctxcache.client import Client, connect
from ctxcache.client.types import Durability

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Level = Literal["memory", "disk"]


class Refused(ValueError):
    """A configuration that cannot be followed; the message says which part of it, and what would do."""


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Where the store is, and how the adapter keeps what it saves. Each adapter adds its own."""

    target: str = "127.0.0.1:7420"
    token_file: str | None = None
    durability: Level = "memory"
    ttl_s: Seconds | None = None
    """How long what is saved is kept after its last access; by default as long as there is room."""
    timeout_s: Seconds = 1.0
    """Longest time of one call, in seconds."""

    @classmethod
    def names(cls) -> list[str]:
        """The settings' names."""
        return [field.name for field in fields(cls)]

    @classmethod
    def of(cls, given: Mapping[str, Any], where: str) -> Self:
        """The settings that a configuration gives at `where`. Raises Refused."""
        for name in given:
            if name not in cls.names():
                raise Refused(f"{where}.{name}: not one of {', '.join(cls.names())}")
        try:
            return TypeAdapter(cls).validate_python(dict(given))
        except ValidationError as error:
            (first, *_) = error.errors(include_url=False)
            name = ".".join(map(str, first["loc"][:1]))
            raise Refused(f"{where}.{name}: {first['msg']}, not {first['input']!r}") from None

    @property
    def level(self) -> Durability:
        """The durability, as the client names it."""
        return Durability[self.durability.upper()]

    def connect(self) -> Client:
        """A client of that store."""
        return connect(self.target, token_file=self.token_file, timeout_s=self.timeout_s)
