"""Each read has one result, by whatever way its rows come: two hundred beside numbers kept by hand."""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.request import urlopen

import pytest
from far_side import LAYOUT, OWN, SPEC, make_rows
from live_server import LiveServer, serving, settings_in
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

import ctxcache
from ctxcache.client import Client
from ctxcache.errors import CacheError
from lab.routes import Route, route_options

READ_COUNT = 200
TOKEN_COUNTS = {"empty": 0, "short": 100, "long": 6000}
"""The long one is more than the arena holds for one reader."""
ROUTES: tuple[Route, ...] = ("auto", "local-socket", "local-grpc", "bulk", "grpc")


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveServer]:
    """A server with a session of each length."""
    sizes = {"arena_size_bytes": 1 << 20, "ssd_size_bytes": 16 << 20}
    with serving(
        settings_in(tmp_path, bulk_listen="127.0.0.1:0", metrics_listen="127.0.0.1:0", **sizes)
    ) as made:
        with ctxcache.connect(made.target) as client:
            client.models.register(SPEC)
            for name, token_count in TOKEN_COUNTS.items():
                session = client.sessions.create(OWN, id=name, layout=LAYOUT)
                for begin in range(0, token_count, 1000):
                    session.append(make_rows(min(1000, token_count - begin), first=begin))
        yield made


def counted(live: LiveServer) -> Counter[str]:
    """Results of reads, as the server's metrics have them."""
    return Counter(
        {
            sample.labels["result"]: int(sample.value)
            for family in scraped(live)
            for sample in family.samples
            if sample.name == "ctxcache_accesses_total" and sample.labels["by"] == "read" and sample.value
        }
    )


def scraped(live: LiveServer) -> list[Metric]:
    """The server's metrics."""
    address = live.ask(lambda server: server.metrics_address)
    with urlopen(f"http://{address}/metrics") as answer:
        return list(text_string_to_metric_families(answer.read().decode()))


def read(client: Client, name: str, end: int | None) -> str:
    """The reason why the first rows did not come; empty where all of them did."""
    try:
        with client.sessions.open(f"sessions/{name}", OWN).read(end=end) as rows:
            for stream in LAYOUT:
                rows.array(stream)
    except CacheError as error:
        return error.reason
    return ""


def test_each_read_has_one_result(live: LiveServer) -> None:
    """A read that is too large for a lease and comes by a stream is a hit, and no miss beside it."""
    draw, expected = random.Random(5), Counter[str]()
    with ExitStack() as clients:
        opened = {
            route: clients.enter_context(ctxcache.connect(live.target, timeout_s=10, **route_options(route)))
            for route in ROUTES
        }
        for _ in range(READ_COUNT):
            route, name = draw.choice(list(opened)), draw.choice([*TOKEN_COUNTS, "absent", "long", "long"])
            is_local = route.startswith("local") or route == "auto"
            token_count = TOKEN_COUNTS.get(name, 0)
            end = draw.choice(
                [None, None, token_count and draw.randrange(1, token_count + 1), token_count + 1]
            )
            problem = read(opened[route], name, end)
            if name == "absent":
                # A client without the arena asks for the session's facts first, which is a look-up.
                expected["never_stored"] += is_local
            elif problem == "CAPACITY_EXCEEDED":
                assert route.startswith("local")
                expected["quota"] += 1
            elif problem:
                assert end == token_count + 1
                expected["refused"] += 1
            else:
                expected["hit" if token_count and end != 0 else "empty"] += 1
            assert counted(live) == +expected, (route, name, end)
    assert expected["hit"] > READ_COUNT / 3
    assert expected["quota"] > READ_COUNT / 20


def test_the_store_says_what_it_saves(tmp_path: Path) -> None:
    """In engine seconds by the rate that is set, in money where a price is, and each tenant's tokens."""
    rates = {"prefill_tokens_per_s": 50, "engine_cents_per_hour": 3600}
    with serving(settings_in(tmp_path, metrics_listen="127.0.0.1:0", **rates)) as live:
        with ctxcache.connect(live.target) as client:
            client.models.register(SPEC)
            session = client.sessions.create(OWN, id="a", layout=LAYOUT)
            session.append(make_rows(100))
            for _ in range(3):
                read(client, "a", None)
            stats = client.admin.stats()
            (use,) = client.admin.list_tenants()
        metrics = {sample.name: sample.value for family in scraped(live) for sample in family.samples}

    assert (stats.read_token_count, use.read_token_count, use.appended_token_count) == (300, 300, 100)
    assert stats.saved_prefill_seconds == pytest.approx(300 / 50)
    # A cent a second: 3600 cents an hour.
    assert stats.saved_dollars == pytest.approx(6 * 0.01)
    assert metrics["ctxcache_saved_prefill_seconds_total"] == pytest.approx(6)
    assert metrics["ctxcache_saved_dollars_total"] == pytest.approx(0.06)
    assert metrics["ctxcache_tenant_read_tokens_total"] == 300
    assert metrics["ctxcache_tenant_appended_tokens_total"] == 100


def test_without_a_price_nothing_is_said_in_money(live: LiveServer) -> None:
    """The fact is not there; the metric is 0."""
    with ctxcache.connect(live.target) as client:
        read(client, "short", None)
        assert client.admin.stats().saved_dollars is None
