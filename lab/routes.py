"""The routes of rows by one word each, for what measures or checks all of them. Needs no torch."""

from typing import Literal, TypedDict

from ctxcache.client.routes import Access, Transport

Route = Literal["auto", "local", "local-socket", "local-grpc", "remote", "bulk", "grpc"]


class RouteOptions(TypedDict):
    """The arguments of `connect` for a route."""

    access: Access
    transport: Transport


_OPTIONS: dict[str, RouteOptions] = {
    "auto": {"access": "auto", "transport": "auto"},
    "local": {"access": "local", "transport": "auto"},
    "local-socket": {"access": "local", "transport": "socket"},
    "local-grpc": {"access": "local", "transport": "grpc"},
    "remote": {"access": "remote", "transport": "auto"},
    "bulk": {"access": "remote", "transport": "socket"},
    "grpc": {"access": "remote", "transport": "grpc"},
}


def route_options(route: str) -> RouteOptions:
    """Return the options of a route. Raises KeyError for a word that names none."""
    return _OPTIONS[route]
