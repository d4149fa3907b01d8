"""Addresses in texts: the `host:port` where a process listens, and the target of a client. Leaf.

Every address of a setting, an option or a client is read here, and nowhere else. Worst case: a host name that
does not resolve, which only its use shows.
"""

import ipaddress
from typing import NamedTuple

PORT_LIMIT = 65535
_GRPC_SCHEMES = ("unix", "unix-abstract", "dns", "ipv4", "ipv6", "vsock", "xds")


class Address(NamedTuple):
    """A host, without brackets, and a TCP port."""

    host: str
    port: int

    @classmethod
    def of(cls, text: str) -> "Address":
        """Read `host:port`; an IPv6 host is in brackets. Raises ValueError with what is wrong.

        gRPC and the system's resolver take a port above 65,535 modulo 65,536.
        """
        host, colon, port = text.rpartition(":")
        is_bracketed = host.startswith("[") and host.endswith("]")
        if not colon or not host or not port.isascii() or not port.isdecimal():
            raise ValueError(f"{text!r} is not host:port")
        if ":" in host and not is_bracketed:
            raise ValueError(f"{text!r} is not host:port; an IPv6 host is in brackets, as [::1]:7420")
        if any(character.isspace() or character in "/,@" for character in host) or host == "[]":
            raise ValueError(f"{text!r} is not host:port: {host!r} is no host")
        if int(port) > PORT_LIMIT:
            raise ValueError(f"{text!r}: the port is above {PORT_LIMIT}")
        return cls(host[1:-1] if is_bracketed else host, int(port))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def tcp_target(target: str) -> Address | None:
    """Host and port of a client's target; None for one of another kind, such as `unix:/path`.

    Raises ValueError for what is no gRPC target: a text without a port, or with a scheme that gRPC lacks.
    """
    scheme, separator, rest = target.partition(":")
    if separator and scheme in _GRPC_SCHEMES:
        # Lists of addresses and an authority are left to gRPC.
        is_one = scheme in ("dns", "ipv4", "ipv6") and "," not in rest
        rest = rest.removeprefix("///") if scheme == "dns" else rest
        return Address.of(rest) if is_one and not rest.startswith("//") else None
    _, is_url, rest = target.partition("://")
    if is_url:
        raise ValueError(f"{target!r} begins with a scheme: say {rest.partition('/')[0] or 'host:port'}")
    if target.startswith("/"):
        raise ValueError(f"{target!r} is not host:port: the target of a Unix socket is unix:{target}")
    return Address.of(target)
