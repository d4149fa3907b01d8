"""Addresses: one way to read them, and a sentence for each that is none, at every door."""

import subprocess
from pathlib import Path

import pytest
from server_process import COMMAND_LINE

import ctxcache
from ctxcache.errors import InvalidArgument, InvalidConfiguration
from ctxcache.settings.config import load
from ctxcache.wire.address import Address, tcp_target

WRONG = (
    "127.0.0.1:99999",
    "127.0.0.1:65536",
    ":7420",
    "localhost",
    "localhost:",
    "localhost:-1",
    "localhost:\u0667",
    "localhost:7420 ",
    "a b:7420",
    "::1:7420",
    "[]:7420",
    "http://localhost:7420",
    "1.2.3.4:1,1.2.3.5:2",
)


@pytest.mark.parametrize("text", WRONG)
@pytest.mark.parametrize("name", ["listen", "bulk_listen", "metrics_listen"])
def test_a_setting_that_is_no_address_is_refused_by_its_name(name: str, text: str) -> None:
    """Before anything is opened; a port beyond 65,535 is not taken modulo 65,536."""
    with pytest.raises(InvalidConfiguration) as raised:
        load({name: text})
    assert raised.value.facts["source"] == name
    assert repr(text) in str(raised.value)


@pytest.mark.parametrize("text", WRONG)
def test_a_client_refuses_a_target_that_is_none(text: str) -> None:
    """A list of addresses is left to gRPC under its own scheme alone."""
    with pytest.raises(InvalidArgument) as raised:
        ctxcache.connect(text)
    assert raised.value.field == "target"


@pytest.mark.parametrize(
    ("target", "address"),
    [
        ("127.0.0.1:7420", ("127.0.0.1", 7420)),
        ("cache.internal:0", ("cache.internal", 0)),
        ("dns:cache:7420", ("cache", 7420)),
        ("dns:///cache:7420", ("cache", 7420)),
        ("[::1]:65535", ("::1", 65535)),
        ("ipv6:[::1]:7420", ("::1", 7420)),
        ("ipv4:10.0.0.1:7420", ("10.0.0.1", 7420)),
        ("ipv4:10.0.0.1:1,10.0.0.2:1", None),
        ("unix:/run/socket", None),
        ("unix:///run/socket", None),
        ("dns://resolver/cache:7420", None),
    ],
)
def test_the_address_of_a_target(target: str, address: tuple[str, int] | None) -> None:
    """A target that names no one host is left to gRPC."""
    assert tcp_target(target) == address


@pytest.mark.parametrize(
    ("text", "is_loopback"),
    [
        ("127.0.0.7:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("0.0.0.0:1", False),
        ("cache:1", False),
    ],
)
def test_loopback_is_known(text: str, *, is_loopback: bool) -> None:
    """What this machine alone reaches needs no TLS."""
    assert Address.of(text).is_loopback is is_loopback


def test_serve_refuses_a_port_that_is_none_and_leaves_no_file(tmp_path: Path) -> None:
    """It was taken modulo 65,536."""
    data = tmp_path / "data"
    options = ("--listen", "127.0.0.1:99999", "--data-directory", str(data))
    command = (*COMMAND_LINE, "serve", *options)
    refused = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert refused.returncode != 0
    assert "listen: '127.0.0.1:99999': the port is above 65535" in refused.stderr
    assert not data.exists()
