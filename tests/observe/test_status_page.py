"""The status page.

Its content, the readers that see names, that no name becomes markup, and that a browser shows it.
"""

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from alert_series import SERIES
from documents import ROOT
from observed import fetch, load, observed
from service_rig import TOKENS, rows

from ctxcache.cache.leases import ReadRequest
from ctxcache.cache.state import EMPTY, HIT, RESULTS
from ctxcache.core.ledger.work import at_work
from ctxcache.core.observations import QUICK_S, Histogram
from ctxcache.core.placement.names import POLICY_NAMES, WORDS
from ctxcache.format.checksums import wire_checksum
from ctxcache.observe import moment, status_page, status_page_guide, status_page_markup
from ctxcache.observe.alerts import STORE_ALERTS, holding
from ctxcache.observe.moment import MINUTES, Moment, Recording, Ring, Sample, quantile, taken
from ctxcache.observe.status import SHOWN, Engine, PathProblem, SessionLine, SessionList, status_of
from ctxcache.observe.status_page import is_own_name, page
from ctxcache.observe.status_page_markup import element
from ctxcache.observe.table import METRICS
from ctxcache.server.server import Server
from ctxcache.v1.block_pb2 import (
    BlockBytes,
    BlockPart,
    BlockSpace,
    NewBlock,
    PutBlocksHeader,
    PutBlocksRequest,
    ReserveBlocks,
)
from ctxcache.v1.block_pb2_grpc import BlockServiceStub
from ctxcache.v1.prefix_pb2 import AdoptPrefixRequest, Prefix
from ctxcache.v1.prefix_pb2_grpc import PrefixServiceStub

CHROMIUM = shutil.which("chromium")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None,
    reason="CHROMIUM IS NOT INSTALLED: the status page was not tested in a browser; apt install chromium",
)
EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;"


async def test_a_minute_that_cannot_be_read_is_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """For want of a descriptor, say; the next one is read."""
    monkeypatch.setattr(moment, "INTERVAL_S", 0.001)
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    reads, is_third = 0, asyncio.Event()

    def read() -> Moment:
        nonlocal reads
        reads += 1
        if reads == 2:
            raise OSError
        if reads == 3:
            is_third.set()
        return Moment([])

    recording = Recording(read)
    recording.start()
    async with asyncio.timeout(10):
        await is_third.wait()
    recording.stop()


def _accesses(hits: float, evicted: float = 0) -> Moment:
    name = "ctxcache_accesses_total"
    return Moment([Sample(name, hits, ("read", "hit")), Sample(name, evicted, ("read", "evicted"))])


async def _get(server: Server, path: str, host: str = "127.0.0.1:1") -> str:
    head = f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
    status, body = await fetch(server, "", head=head)
    assert status == 200
    return body


# -- the last hour -----------------------------------------------------------------------------------


def test_a_ring_keeps_an_hour_of_growth() -> None:
    """Each minute's own, the sum of the last ones, and no more than an hour."""
    ring = Ring()
    for i in range(MINUTES + 40):
        ring.add(_accesses(i * 10))
    now = _accesses((MINUTES + 39) * 10 + 5)
    by_minute = ring.by_minute(now)

    assert len(by_minute) == MINUTES
    assert by_minute[-1].one("ctxcache_accesses_total", "read", "hit") == 5
    assert by_minute[0].one("ctxcache_accesses_total", "read", "hit") == 10
    assert ring.last(now, 3).one("ctxcache_accesses_total", "read", "hit") == 25
    assert ring.last(now, 1000).one("ctxcache_accesses_total", "read", "hit") == MINUTES * 10 + 5


def test_what_was_not_there_before_grew_from_nothing() -> None:
    """A label's first sample counts in full; gauges are not kept."""
    ring = Ring()
    ring.add(Moment([Sample("ctxcache_sessions", 5)]))
    grown = ring.last(_accesses(3), 5)

    assert grown.one("ctxcache_accesses_total", "read", "hit") == 3
    assert not ring.last(Moment([Sample("ctxcache_sessions", 9)]), 5).of("ctxcache_sessions")


@pytest.mark.parametrize(
    ("values", "expected"), [([], 0), ([0.003] * 10, 0.0025 + 0.0025 * 0.99), ([100.0], 30.0)]
)
def test_a_quantile_is_within_its_bucket(values: list[float], expected: float) -> None:
    """As Prometheus reckons it; above the last bound it is that bound."""
    histogram = Histogram(QUICK_S)
    for each in values:
        histogram.observe(each)

    assert quantile([taken(histogram)], 0.99) == pytest.approx(expected)


# -- alerts ------------------------------------------------------------------------------------------


def _sample_of(name: str) -> list[tuple[str, dict[str, str], list[float]]]:
    """The sample that fires an alert in its own test: metric, labels, values by minute."""
    found = []
    for series, values in SERIES[name].series:
        metric, labels = re.fullmatch(r"(\w+){(.*)}", series).groups()  # type: ignore[union-attr]
        found.append((metric, dict(re.findall(r'(\w+)="([^"]*)"', labels)), _expanded(values)))
    return found


def _expanded(values: str) -> list[float]:
    numbers: list[float] = []
    for part in values.split():
        match = re.fullmatch(r"(-?[\d.]+)(?:([+-][\d.]+))?x(\d+)", part)
        if match:
            begin, step, count = float(match[1]), float(match[2] or 0), int(match[3])
            numbers += [begin + step * i for i in range(count + 1)]
        elif part.startswith("_"):
            numbers += [0.0] * (int(part[2:] or 0) + 1 if "x" in part else 1)
        else:
            numbers.append(float(part))
    return numbers


GAUGES = [
    alert.name
    for alert in STORE_ALERTS
    if not isinstance(alert.measure, str)
    and alert.name
    not in {"CtxcacheSlowCalls", "CtxcacheEventLoopStalls", "CtxcacheSlowDevice", "CtxcacheInternalErrors"}
]


@pytest.mark.parametrize("alert", GAUGES)
def test_what_fires_prometheus_alert_is_on_the_page(alert: str) -> None:
    """The series that make Prometheus' rule fire, read minute by minute.

    And nothing holds of a well server.
    """
    series = _sample_of(alert)
    length = max(len(values) for _, _, values in series)

    def at(minute: int) -> Moment:
        samples = [Sample("ctxcache_ready", 1)] if alert != "CtxcacheNotReady" else []
        for metric, labels, values in series:
            order = tuple(labels.get(label, "") for label in METRICS[metric].labels)
            samples.append(Sample(metric, values[min(minute, len(values) - 1)], order))
        return Moment(samples)

    ring = Ring()
    held = set()
    for minute in range(length):
        held |= {each.alert for each in holding(at(minute), ring)}
        ring.add(at(minute))
    assert held == {alert}
    assert not list(holding(Moment([Sample("ctxcache_ready", 1)]), Ring()))


@pytest.mark.parametrize(
    ("alert", "metric", "labels"),
    [
        ("CtxcacheSlowCalls", "ctxcache_rpc_seconds", ("SessionService/GetSession", "OK", "")),
        ("CtxcacheEventLoopStalls", "ctxcache_event_loop_lag_seconds", ()),
        ("CtxcacheSlowDevice", "ctxcache_promotion_seconds", ()),
        (
            "CtxcacheInternalErrors",
            "ctxcache_rpc_seconds",
            ("SessionService/ReadSession", "INTERNAL", "INTERNAL"),
        ),
    ],
)
def test_distributions_have_alerts_too(alert: str, metric: str, labels: tuple[str, ...]) -> None:
    """One in a hundred is late; or there is one at all."""
    histogram, ready = Histogram(QUICK_S), Sample("ctxcache_ready", 1)
    ring = Ring()
    ring.add(Moment([ready, Sample(metric, taken(histogram), labels)]))
    for seconds in (0.001, 3.0):
        histogram.observe(seconds)

    assert [
        each.alert for each in holding(Moment([ready, Sample(metric, taken(histogram), labels)]), ring)
    ] == [alert]


# -- what is shown -----------------------------------------------------------------------------------


async def test_it_says_what_the_server_does(tmp_path: Path) -> None:
    """In both forms: tiers, hits, reasons, sessions, what differs from its default."""
    async with observed(tmp_path, tenant_shares="default=0.5:0.9") as (server, client, clock):
        await load(client, clock)
        facts = json.loads(await _get(server, "/status.json"))
        html = await _get(server, "/")

    assert [path["tier"] for path in facts["paths"]] == ["dram", "ssd"]
    assert facts["last_hour"]["hit_count"] > 0
    assert facts["last_hour"]["ssd_token_count"] >= 130
    assert (
        sum(facts["misses"].values()) == facts["last_hour"]["access_count"] - facts["last_hour"]["hit_count"]
    )
    assert set(facts["misses"]) >= {"evicted", "expired", "never_stored", "fingerprint_mismatch"}
    hottest = [each["session_id"] for each in facts["sessions"]["hottest"]]
    assert hottest[0] == "s23"
    assert len(hottest) <= SHOWN
    assert facts["settings"]["max_concurrent_rpcs"] == "8"
    assert "listen" in facts["settings"]
    assert "drain_timeout_s" in facts["settings"]
    assert "room_wait_s" not in facts["settings"]
    assert [each["alert"] for each in facts["alerts"]] == ["CtxcacheEvictsWhatComesBack"]
    for text in (
        "look here",
        "CtxcacheEvictsWhatComesBack",
        "SSD is too small for what comes back",
        "<code>ctxcache simulate</code>",
        "s23",
        "max_concurrent_rpcs",
        "Write-behind",
        "In flight",
    ):
        assert text in html


@pytest.mark.parametrize("cents", [0, 360_000], ids=["without a price", "with a price"])
async def test_it_says_what_engines_did_not_have_to_compute(tmp_path: Path, cents: int) -> None:
    """Tokens of prompts, engines' time by the rate that is set, and money where a price is."""
    async with observed(tmp_path, prefill_tokens_per_s=1, engine_cents_per_hour=cents) as (
        server,
        client,
        clock,
    ):
        await load(client, clock)
        facts = json.loads(await _get(server, "/status.json"))
        html = await _get(server, "/")

    hour, start = facts["saved_last_hour"], facts["saved_since_start"]
    reused = facts["last_hour"]["dram_token_count"] + facts["last_hour"]["ssd_token_count"]
    assert hour["token_count"] == reused > 100
    assert hour["prefill_s"] == pytest.approx(reused)
    assert hour["dollars"] == (pytest.approx(reused) if cents else None)
    assert start == hour
    tile = html[html.index(">Saved<") :].partition("</div></div>")[0]
    assert (f"{reused:,.2f} $" in tile) == bool(cents)
    assert (" of prefill, " if cents else "of engines&#x27; prefill, ") in tile


async def test_what_prompts_found_by_their_tokens_shows(tmp_path: Path) -> None:
    """Tokens asked for, found and adopted, and the blocks of engines."""
    tokens = Prefix(token_ids=rows(1, 0, 150, TOKENS))
    space = BlockSpace(model_fingerprint=bytes(32), parts=[BlockPart(layer_end=1)])
    block = NewBlock(key=bytes(32), part_bytes=[3])
    data = BlockBytes(data=b"abc", checksum=wire_checksum(b"abc"))
    async with observed(tmp_path) as (server, client, _):
        await client.create("a")
        await client.append("a", 1, 0, 128, is_durable=True)
        await client.create("b")
        prefixes: Any = PrefixServiceStub(client.channel)
        await prefixes.AdoptPrefix(
            AdoptPrefixRequest(session="sessions/b", model_fingerprint=client.fingerprint, prefix=tokens)
        )
        blocks: Any = BlockServiceStub(client.channel)
        header = PutBlocksHeader(blocks=ReserveBlocks(space=space, blocks=[block]))
        await blocks.PutBlocks(iter([PutBlocksRequest(header=header), PutBlocksRequest(bytes=data)]))
        facts = json.loads(await _get(server, "/status.json"))
        html = await _get(server, "/")

    sharing = facts["sharing"]
    assert (sharing["asked_token_count"], sharing["found_token_count"]) == (150, 128)
    assert sharing["adopted_bytes"] > 0
    assert sharing["block_count"] == 1
    assert "Found by tokens" in html
    assert "85 %" in html


async def test_what_is_running_shows(tmp_path: Path) -> None:
    """A lease that is held, and a session that is not on SSD."""
    async with observed(tmp_path) as (server, client, _):
        await client.create("one")
        await client.append("one", 1, 0, 64)
        request = ReadRequest("default", "one", client.fingerprint, None)
        lease = await at_work(server.cache.leases.acquire(request))
        facts = json.loads(await _get(server, "/status.json"))
        server.cache.leases.release(lease.lease_id)

    running = {each["name"]: each["value"] for each in facts["running"]}
    assert running["Leases"] == 1
    assert running["Held by leases"] > 0
    assert facts["backlog"]["session_count"] == 1


@pytest.mark.parametrize(
    ("changes", "host", "are_shown"),
    [
        ({}, "127.0.0.1:7421", True),
        ({}, "localhost:7421", True),
        ({}, "[::1]:7421", True),
        ({}, "evil.example:7421", False),
        ({}, "", False),
        ({"status_names": "off"}, "localhost", False),
        ({"metrics_listen": "0.0.0.0:0"}, "localhost", False),
        ({"metrics_listen": "0.0.0.0:0", "status_names": "on"}, "10.0.0.7:7421", True),
        ({"identities": "uid:0=default:operator"}, "localhost", False),
    ],
)
async def test_names_are_for_whom_they_may_be(
    tmp_path: Path, changes: Mapping[str, str], host: str, *, are_shown: bool
) -> None:
    """By itself only on loopback, while callers are not told apart, under no name that others point here."""
    identities = changes.get("identities")
    settings = {name: value for name, value in changes.items() if name != "identities"}
    async with observed(tmp_path, **settings) as (server, client, _):
        await client.create("secret-session")
        await client.append("secret-session", 1, 0, 64)
        if identities:
            server._identification.is_open = False
        html, facts = await _get(server, "/", host), json.loads(await _get(server, "/status.json", host))

    assert ("secret-session" in html) == are_shown
    assert (facts["sessions"] is not None) == (facts["engines"] is not None) == are_shown
    assert "secret-session" in json.dumps(facts) if are_shown else "secret-session" not in json.dumps(facts)
    assert ("status_names" in html.partition("Settings")[0]) != are_shown


def test_host_names_of_others_are_told() -> None:
    """An address, or localhost."""
    assert all(map(is_own_name, ("127.0.0.1", "10.1.2.3:80", "[::1]:80", "[fe80::1]", "localhost:7421")))
    assert not any(
        map(is_own_name, ("", "a.example", "a.example:80", "localhost.a.example", "127.0.0.1.a.example:1"))
    )


def test_no_text_becomes_markup() -> None:
    """Text that `element` did not make is escaped, in text and in attributes."""
    assert element("b", EVIL, title=EVIL) == (
        '<b title="{0}">{0}</b>'.format(
            "&lt;script&gt;alert(1)&lt;/script&gt;&quot;&#x27;&gt;&lt;img src=x onerror=alert(1)&gt;&amp;amp;"
        )
    )


def _evil_page() -> str:
    bad = SessionLine(EVIL, EVIL, EVIL, 1, 1.0, 1.0, 1, 1, is_durable=True)
    samples = [
        Sample("ctxcache_info", 1, (EVIL, EVIL)),
        Sample("ctxcache_ready", 1),
        Sample("ctxcache_tenant_sessions", 1, (EVIL,)),
        Sample("ctxcache_tier_capacity_bytes", 1, ("dram", EVIL)),
        Sample("ctxcache_path_state", 1, ("dram", EVIL, EVIL)),
        Sample("ctxcache_accesses_total", 1, ("read", EVIL)),
    ]
    ring = Ring()
    ring.add(Moment(()))
    status = status_of(
        Moment(samples),
        ring,
        now_s=1,
        data_directory=EVIL,
        addresses=(EVIL,),
        path_problems={EVIL: PathProblem(EVIL, 0.0)},
        promotion_count=0,
        settings={EVIL: EVIL},
        sessions=SessionList((bad,), (bad,), 1),
        engines=(Engine(EVIL, EVIL, 1, is_lost=True),),
    )
    return page(status)


def test_no_name_on_the_page_becomes_markup() -> None:
    """Session, tenant, model, engine, path, setting, reason: in whatever place."""
    html = _evil_page()

    assert html.count("alert(1)") > 10
    assert html.count("<script") == 1
    assert "<img" not in html
    assert '<script src="/status.js" defer></script>' in html


async def test_a_browser_is_told_to_run_nothing_else(tmp_path: Path) -> None:
    """The policy comes with every page, and the page needs no more than it allows."""
    async with observed(tmp_path) as (server, _, _):
        host, _, port = server.metrics_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
        writer.close()

    policy = re.search(r"Content-Security-Policy: (.*)\r\n", head)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]
    assert not re.search(r"\sstyle=|<style|\son\w+=", body)
    assert set(re.findall(r'(?:src|href)="([^"]+)"', body)) == {
        "data:,",
        "/status.css",
        "/status.js",
        "/status.json",
        "/metrics",
        "/runbook",
    }


async def test_many_who_look_cost_one_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a second nothing is read again."""
    async with observed(tmp_path) as (server, _, _):
        reads: list[Moment] = []
        read = server.recording.read

        def counted() -> Moment:
            reads.append(read())
            return reads[-1]

        monkeypatch.setattr(server.recording, "read", counted)
        monkeypatch.setattr(status_page, "FRESH_S", 3600)
        for _ in range(5):
            await _get(server, "/")
            await _get(server, "/status.json")

    assert len(reads) == 1


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (status_page_markup.size_text(0), "0 B"),
        (status_page_markup.size_text(1536), "1.5 KiB"),
        (status_page_markup.size_text(3 << 40), "3.0 TiB"),
        (status_page_markup.count_text(950), "950"),
        (status_page_markup.count_text(12345), "12.3k"),
        (status_page_markup.count_text(4e6), "4.0M"),
        (status_page_markup.time_text(0.0032), "3.2 ms"),
        (status_page_markup.time_text(7500), "2 h 5 min"),
        (status_page_markup.time_text(3 * 86400 + 4 * 3600), "3 d 4 h"),
        (status_page_markup.share_text(0.9999), "99.9 %"),
        (status_page_markup.share_text(1), "100 %"),
        (status_page_markup.share_text(0.5), "50 %"),
    ],
)
def test_numbers_are_written_for_people(written: str, expected: str) -> None:
    """Short, with a unit, and nothing that is not all is called all."""
    assert written == expected


# -- the store itself, and what is wrong with it -----------------------------------------------------


async def test_the_page_names_its_store_and_its_placement(tmp_path: Path) -> None:
    """Of ten open pages each is told by its title; the policy is in words."""
    async with observed(tmp_path, placement_policy="lru") as (server, _, _):
        html, facts = await _get(server, "/"), json.loads(await _get(server, "/status.json"))

    assert facts["data_directory"] == str(tmp_path / "data")
    assert f"<title>ctxcache {tmp_path / 'data'}</title>" in html
    assert f"{tmp_path / 'data'}</code>" in html.partition("<main>")[0]
    assert "placement: <b>lru</b>, the least recently used leaves first" in html


def test_every_policy_and_every_reason_has_words() -> None:
    """None is shown by its name alone."""
    assert set(WORDS) == set(POLICY_NAMES)
    assert set(status_page.MISSES) == set(RESULTS) - {HIT, EMPTY}


def _page_after(minutes: int, *samples: Sample) -> str:
    """The page of a store whose accesses grew by some in each minute since its start."""
    ring = Ring()
    for i in range(minutes):
        ring.add(_accesses(i * 10.0))
    now = [Sample("ctxcache_info", 1, ("1", "value")), Sample("ctxcache_ready", 1)]
    counted = Sample("ctxcache_accesses_total", minutes * 10.0, ("read", "hit"))
    status = status_of(
        Moment([*now, counted, *samples]),
        ring,
        now_s=minutes * 60,
        data_directory="/data",
        addresses=("127.0.0.1:7420",),
        path_problems={},
        promotion_count=0,
        settings={},
        sessions=None,
        engines=None,
    )
    return page(status)


@pytest.mark.parametrize(
    ("minutes", "width", "labels"),
    [
        (1, 1, ["1 min ago", "now"]),
        (3, 3, ["3 min ago", "now"]),
        (24, 24, ["24 min ago", "12 min", "now"]),
        (200, MINUTES, ["1 h ago", "30 min", "now"]),
    ],
)
def test_an_axis_is_as_long_as_the_store_has_lived(minutes: int, width: int, labels: list[str]) -> None:
    """A store of three minutes has no empty hour, and says of which time its figures are."""
    html = _page_after(minutes)

    assert set(re.findall(r'class="columns" viewBox="0 0 (\d+) 100"', html)) == {str(width * 10)}
    axes = re.findall(r'<p class="axis">(.*?)</p>', html)
    assert [re.findall(r"<span>([^<]*)</span>", axis) for axis in axes] == [labels] * 2
    assert ("last hour" in html) == (minutes >= MINUTES)
    assert (f"since the start, {minutes} min" in html) == (minutes < MINUTES)


def test_misses_are_in_words_the_most_frequent_first_with_shares() -> None:
    """Each with its share of all misses, which is its bar too."""
    missed = [
        Sample("ctxcache_accesses_total", count, ("read", reason))
        for reason, count in (("device_lost", 10.0), ("evicted", 60.0), ("never_stored", 30.0))
    ]
    html = _page_after(2, *missed)
    card = html.partition("Why sessions were missed")[2].partition("</section>")[0]
    rows = re.findall(r'<span>([^<]+)</span><b>([^<]+)</b>.*?width="([\d.]+)"', card)

    assert rows == [
        ("evicted to make room", "60 · 60 %", "600.0"),
        ("never stored under that name", "30 · 30 %", "300.0"),
        ("lies on a lost SSD path", "10 · 10 %", "100.0"),
    ]
    assert "100 of 120 accesses" in card


async def test_an_empty_store_says_how_to_point_an_engine_at_it(tmp_path: Path) -> None:
    """A line each, with the address that it listens on; charts come with the first session."""
    async with observed(tmp_path) as (server, _, _):
        empty = await _get(server, "/")
        address = server.addresses[0]
    lines = status_page_guide.lines(address)

    assert list(lines) == ["vLLM", "LMCache", "SGLang", "llama.cpp", "Python"]
    for line in lines.values():
        assert address in line
        assert element("code", line) in empty
    assert 'class="columns"' not in empty


async def test_a_store_with_a_session_shows_charts(tmp_path: Path) -> None:
    """The lines for engines are gone then."""
    async with observed(tmp_path) as (server, client, _):
        await client.create("one")
        await client.append("one", 1, 0, 64)
        html = await _get(server, "/")

    assert 'class="columns"' in html
    assert "Point an engine at it" not in html


@pytest.mark.parametrize(
    ("engine", "document", "pattern"),
    [
        ("vLLM", "vllm", r"--kv-transfer-config '(\{.*?\})'"),
        ("LMCache", "lmcache", r"--l2-adapter '(\{.*?\})'"),
        ("SGLang", "sglang", r"--hicache-storage-backend-extra-config \\?\s*'(\{.*?\})'"),
    ],
)
def test_the_lines_are_those_of_the_documents(engine: str, document: str, pattern: str) -> None:
    """The same JSON, but for the store's address and the model's directory."""
    line = status_page_guide.lines("127.0.0.1:7420")[engine]
    text = (ROOT / "docs" / f"{document}.md").read_text()

    def said_in(source: str) -> dict[str, Any]:
        found = re.search(pattern, source, re.DOTALL)
        assert found is not None
        said: dict[str, Any] = json.loads(found[1])
        for place in (said, said.get("adapter_params", {})):
            place.pop("target", None)
            place.pop("model_directory", None)
        said.pop("kv_connector_extra_config", None)
        return said

    assert said_in(line) == said_in(text)
    options = set(re.findall(r"--[a-z][\w-]+", line))
    assert options <= set(re.findall(r"--[a-z][\w-]+", text))


def test_a_guarded_store_says_what_callers_need_besides() -> None:
    """A store on all addresses is named by its machine, and settings that guard it are named."""
    open_to_all = status_page_guide.guide(["0.0.0.0:7420"], {})
    guarded = status_page_guide.guide(["0.0.0.0:7420"], {"tls_certificate": "/t", "token_hashes": "/h"})

    for html in (open_to_all, guarded):
        assert "--store HOST:7420" in html
        assert "HOST is this machine" in html
    assert "Callers need a token or a certificate besides" not in open_to_all
    assert "This store sets <code>tls_certificate</code>, <code>token_hashes</code>. Callers need" in guarded


def test_an_address_is_one_that_a_caller_may_name() -> None:
    """All addresses are none; a socket's path is one."""
    assert status_page_guide.reachable(["0.0.0.0:7420"]) == "HOST:7420"
    assert status_page_guide.reachable(["[::]:7420"]) == "HOST:7420"
    assert status_page_guide.reachable(["10.0.0.7:7420", "unix:/run/s"]) == "10.0.0.7:7420"
    assert status_page_guide.reachable(["unix:/run/s"]) == "unix:/run/s"


async def test_a_lost_disk_says_which_since_when_and_what_it_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With why, what to do, and the way to the runbook's entry; its bar is not that of a well one."""
    disks = (tmp_path / "a", tmp_path / "b")
    for disk in disks:
        disk.mkdir()
    async with observed(tmp_path, ssd_directories=disks) as (_, client, _):
        for i in range(4):
            await client.create(f"s{i}")
            await client.append(f"s{i}", i, 0, 64, is_durable=True)
    (tmp_path / "a").rename(tmp_path / "gone")
    async with observed(tmp_path, ssd_directories=disks, ssd_missing="serve") as (server, _, clock):
        await at_work(server.cache.devices.look())
        facts = json.loads(await _get(server, "/status.json"))
        since_s = facts["paths"][1]["problem_time_s"]
        clock.jump(to_ns=round((since_s + 720.5) * 10**9))
        monkeypatch.setattr(status_page, "FRESH_S", 0)
        facts, html = json.loads(await _get(server, "/status.json")), await _get(server, "/")

    lost, well = facts["paths"][1:]
    assert (lost["path"], lost["state"]) == (str(disks[0] / "segments.dat"), "lost")
    assert lost["problem"]
    assert (well["problem"], well["problem_time_s"]) == ("", None)
    entry = re.search(r'<li class="critical">(.*?)</li>', html, re.DOTALL)
    assert entry is not None
    told = re.sub(r"<[^>]+>", "", entry[1])
    since = datetime.fromtimestamp(since_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
    assert abs(since_s - time.time()) < 600
    assert f"{disks[0]}/segments.dat is lost since {since}, 12 min ago: {lost['problem']}" in told
    assert "It costs 128 tokens of 2 sessions, until it is back." in told
    assert (facts["withheld_token_count"], facts["withheld_session_count"]) == (128, 2)
    assert "Do: Mount or mend it" in told
    assert 'href="/runbook#ctxcachepathlost"' in entry[1]
    tiers = html.partition("<h2>Tiers</h2>")[2].partition("</section>")[0]
    assert re.findall(r'height="10" class="(\w+)"', tiers) == ["dram", "mark", "mark", "critical", "ssd"]


@pytest.mark.parametrize(
    ("state", "bar", "pill"),
    [
        ("open", "ssd", ""),
        ("resting", "warning", "warning"),
        ("fenced", "critical", "critical"),
        ("lost", "critical", "critical"),
    ],
)
def test_a_bar_has_the_colour_of_its_paths_state(state: str, bar: str, pill: str) -> None:
    """As grave as its alert: a path that an operator lets rest is no emergency."""
    html = _page_after(
        2,
        Sample("ctxcache_tier_capacity_bytes", 10, ("ssd", "/d")),
        Sample("ctxcache_tier_used_bytes", 5, ("ssd", "/d")),
        Sample("ctxcache_path_state", 1, ("ssd", "/d", state)),
    )
    tiers = html.partition("<h2>Tiers</h2>")[2].partition("</section>")[0]

    assert re.findall(r'<rect [^>]*class="(\w+)"', tiers) == [bar]
    assert re.findall(r'class="pill (\w+)"', tiers) == ([pill] if pill else [])


async def test_the_command_that_an_alert_of_a_path_names_has_the_reason(tmp_path: Path) -> None:
    """What stands before `for the reason` is run, as an operator does who follows the alert."""
    disks = (tmp_path / "a", tmp_path / "b")
    for disk in disks:
        disk.mkdir()
    async with observed(tmp_path, ssd_directories=disks):
        pass
    (tmp_path / "a").rename(tmp_path / "gone")
    async with observed(tmp_path, ssd_directories=disks, ssd_missing="serve") as (server, _, _):
        problem = server.cache.ssd.refusals[0].problem
        commands = {
            alert.name: re.findall(r"`(ctxcache [a-z -]+)` for the reason", alert.look)
            for alert in STORE_ALERTS
            if alert.name in status_page.STATE_OF
        }
        told = [
            await asyncio.to_thread(_output_of, command, server.addresses[0])
            for (command,) in commands.values()
        ]

    assert len(told) == 3
    assert [problem in text for text in told] == [True] * 3


def _output_of(command: str, target: str) -> str:
    program = Path(sys.executable).with_name("ctxcache")
    words = [str(program), *command.split()[1:], "--target", target]
    wide = os.environ | {"COLUMNS": "300"}
    return subprocess.run(words, capture_output=True, text=True, check=True, timeout=60, env=wide).stdout


@pytest.mark.parametrize(
    ("alert", "command"),
    [
        ("CtxcacheNotReady", "ctxcache lease list"),
        ("CtxcacheArenaHeld", "ctxcache lease list"),
        ("CtxcacheSingleCopies", "ctxcache tier list"),
    ],
)
def test_an_alert_names_the_command_that_has_the_reason(alert: str, command: str) -> None:
    """Not only the metric that says that there is one."""
    (look,) = [each.look for each in STORE_ALERTS if each.name == alert]

    assert f"`{command}`" in look


async def test_the_store_shows_its_runbook(tmp_path: Path) -> None:
    """An entry for each alert that the page can link to, and none of its links leads nowhere."""
    async with observed(tmp_path) as (server, _, _):
        html = await _get(server, "/runbook")
    ids = set(re.findall(r' id="(\w+)"', html))

    assert ids == {alert.name.lower() for alert in STORE_ALERTS}
    linked = set(re.findall(r'href="/runbook#(\w+)"', html))
    assert "ctxcacheeventloopstalls" in linked
    assert linked <= ids
    assert "<script" not in html


# -- in a browser ------------------------------------------------------------------------------------


def _dom(address: str, directory: Path, *options: str) -> str:
    """The page as a browser has it after its script has run."""
    assert CHROMIUM is not None
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={directory}",
        *options,
        "--dump-dom",
        f"http://{address}/",
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


@needs_chromium
async def test_a_browser_shows_it_and_keeps_it_fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script runs under the policy, asks again, and shows what has come since.

    An evil name stays text.
    """
    monkeypatch.setattr(status_page, "FRESH_S", 0)
    async with observed(tmp_path) as (server, client, clock):
        await load(client, clock)
        count = 0

        def version() -> str:
            nonlocal count
            count += 1
            return f"look-{count}-{EVIL}"

        info = Sample("ctxcache_info", 1, ("1", "value"))
        read = server.recording.read
        monkeypatch.setattr(
            server.recording, "read", lambda: _with(read(), info._replace(labels=(version(), "value")))
        )
        # Virtual time: beyond the first refreshes.
        html = await asyncio.to_thread(
            _dom, server.metrics_address, tmp_path / "profile", "--virtual-time-budget=8000"
        )

    shown = re.search(r"look-(\d+)-", html)
    assert shown is not None
    assert int(shown[1]) > 1
    assert "s23" in html
    assert "<img" not in html
    assert html.count("<script") == 1
    assert re.search(r'id="age">as of ', html)


def _with(moment: Moment, sample: Sample) -> Moment:
    moment._values[sample.name] = {sample.labels: sample.value}
    return moment
