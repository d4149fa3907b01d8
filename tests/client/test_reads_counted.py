"""Each read has one result, by whatever way its rows come: two hundred beside numbers kept by hand."""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest
from far_side import LAYOUT, OWN, SPEC, make_rows
from live_server import LiveServer, serving, settings_in
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

import ctxcache
from ctxcache.client import Client
from ctxcache.errors import CacheError
from ctxcache.format.streams import TOKENS
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
            for family in scraped(live, "ctxcache_accesses_total")
            for sample in family.samples
            if sample.labels["by"] == "read" and sample.value
        }
    )


def scraped(live: LiveServer, name: str = "") -> list[Metric]:
    """The server's metrics, or only this one: for all of them the parser takes many times as long."""
    address = live.ask(lambda server: server.metrics_address)
    with urlopen(f"http://{address}/metrics") as answer:
        lines = answer.read().decode().splitlines(keepends=True)
    return list(text_string_to_metric_families("".join(line for line in lines if name in line)))


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


def test_a_prefix_that_is_found_held_and_read_is_one_read(live: LiveServer) -> None:
    """However far the two come one after the other; each further lease by the token is a read of its own."""
    draw, expected, token_count = random.Random(6), Counter[str](), 0
    ids: dict[str, list[int]] = {
        name: make_rows(count)[TOKENS].view(np.int32).ravel().tolist() for name, count in TOKEN_COUNTS.items()
    }
    with ExitStack() as clients:
        opened = {
            route: clients.enter_context(ctxcache.connect(live.target, timeout_s=10, **route_options(route)))
            for route in ROUTES
        }
        for number in range(READ_COUNT):
            route, is_held = draw.choice(list(opened)), draw.random() < 0.8
            prompts: list[list[int]] = [ids["short"], ids["long"][: draw.choice([64, 640, 1280])], [9] * 100]
            asked = draw.choice(prompts)
            ttl = timedelta(minutes=1) if is_held else None
            match = opened[route].prefixes.match(OWN, asked, layout=LAYOUT, lease_ttl=ttl)
            assert match.token_count in (0, len(asked) // 64 * 64)
            taken_count = 0
            if match.lease_token:
                for reader in draw.choices(
                    [opened["auto"], opened["local-socket"]], k=draw.choice([0, 1, 1, 3])
                ):
                    with reader.prefixes.leased(match.lease_token, OWN) as rows:
                        rows.array(LAYOUT[0])
                    taken_count += 1
                opened[route].prefixes.release(match.lease_token)
            read_count = max(1, taken_count) if match.token_count and is_held else 0
            expected["hit"] += read_count
            token_count += read_count * match.token_count
            assert counted(live) == +expected, (number, route, taken_count)
        assert opened["auto"].admin.stats().read_token_count == token_count
    assert expected["hit"] > READ_COUNT / 2


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
