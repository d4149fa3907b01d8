"""Two hosts, each a vLLM and its store, and a router in front: what one has computed, the other goes on from.

    router ──► engine A ── store A ─┐
       └─────► engine B ── store B ─┴─ one bucket

Every reply is compared, token for token, with one that the same engine computes beside it from nothing.
"""

import itertools
import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ctxcache
from ctxcache.fleet.peers import SILENT_S
from gpu_worker.engines.vllm.handover import KEY
from lab.engines.families import SHAPE
from lab.engines.vllm_process import Reply, VllmEngine
from tests.engines.vllm_kills import words
from tests.fleet.stores import BEAT_S
from tests.server_process import ServerProcess, write_secret

HOSTS = ("127.0.0.2", "127.0.0.3")
"""As the router calls the engines."""
FIRST, NEXT, COUNT = 600, 300, 16
"""Tokens of a conversation's first prompt, of what its user says next, and of a reply."""
SALTS = (f"nobody's {number}" for number in itertools.count())


@dataclass
class Fleet:
    """Engines of one model and their stores, by host."""

    model: Path
    engines: list[VllmEngine]
    stores: list[ServerProcess]
    draw: random.Random = field(default_factory=lambda: random.Random(1))

    def turn(self, number: int, prompt: list[int], session: str | None, **says: Any) -> Reply:
        """A reply of one engine, compared."""
        own = {"prompt": prompt, "session": session, "count": COUNT, "says": says}
        other = {"prompt": prompt, "session": None, "count": COUNT, "salt": next(SALTS)}
        reply, computed = self.engines[number].ask(own, other)
        assert computed.cached_count == 0
        assert reply.token_ids == computed.token_ids
        return reply

    def talk(self, turns: list[int], session: str | None, *, is_told: bool) -> list[tuple[int, int]]:
        """A conversation whose turns are at these engines: each prompt's tokens, and those not computed."""
        prompt, at = words(self.draw, FIRST), turns[0]
        counts = list[tuple[int, int]]()
        for number in turns:
            source = {"kv_request_id": "1", "remote_host": HOSTS[at], "remote_port": 5710}
            reply = self.turn(number, prompt, session, **({"remote_kv_source": source} if is_told else {}))
            counts.append((len(prompt), reply.cached_count))
            prompt, at = [*prompt, *reply.token_ids, *words(self.draw, NEXT)], number
        return counts


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two hosts, whose engines are so slow that whatever another host has is worth its way."""
    place = tmp_path_factory.mktemp("fleet")
    torch.manual_seed(0)
    shape = {**SHAPE, "max_position_embeddings": 4096}
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(place / "tiny")
    write_secret(place / "secret", "a secret of this fleet of stores")
    with ExitStack() as running:
        stores = [
            running.enter_context(
                ServerProcess(
                    place / f"store{number}",
                    *(
                        "--fleet-bucket",
                        f"file://{place}/bucket",
                        "--fleet-secret-file",
                        str(place / "secret"),
                    ),
                    *("--fleet-beat-s", str(BEAT_S), "--prefill-tokens-per-s", "300"),
                )
            )
            for number in range(len(HOSTS))
        ]
        engines = [
            running.enter_context(
                VllmEngine(
                    place / "tiny",
                    store.target,
                    place / f"engine{number}.log",
                    environment={"VLLM_HOST_IP": host},
                    enable_prefix_caching=False,
                    max_model_len=4096,
                    extra={"durability": "memory"},
                )
            )
            for number, (store, host) in enumerate(zip(stores, HOSTS, strict=True))
        ]
        made = Fleet(place / "tiny", engines, stores)
        # Each store hears of its engine's host with the first prompt, and says so at its next beat.
        for number in range(len(HOSTS)):
            made.turn(number, words(made.draw, 100), None)
        deadline = time.monotonic() + 60
        records = place / "bucket" / "v1" / "n"
        while not all(any(host in path.read_text() for path in records.iterdir()) for host in HOSTS):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield made


def _moved(counts: list[tuple[int, int]]) -> None:
    """Each turn but the first goes on from what the one before had, in whole runs of 64."""
    for (before, _), (_, cached) in itertools.pairwise(counts):
        assert cached >= (before + COUNT - 1) // 64 * 64


def test_a_conversation_without_a_name_moves_with_the_routers_word(fleet: Fleet) -> None:
    """As llm-d's sidecar says it."""
    _moved(fleet.talk([0, 1, 0, 1, 1, 0], None, is_told=True))


def test_a_conversation_with_a_name_moves_without_a_word(fleet: Fleet) -> None:
    """Its head says where it is."""
    counts = fleet.talk([0, 1, 0, 1, 1, 0], "alice", is_told=False)
    assert all(cached >= before + COUNT - 32 for (before, _), (_, cached) in itertools.pairwise(counts))


@pytest.mark.parametrize(
    "said",
    [
        "a host",
        7,
        [],
        {},
        {"remote_host": 7},
        {"remote_host": ""},
        {"remote_host": "x" * 400},
        {"remote_host": "10.0.0.9"},
    ],
)
def test_words_that_name_no_host_cost_nothing(fleet: Fleet, said: object) -> None:
    """The prompt is computed."""
    assert fleet.turn(1, words(fleet.draw, FIRST), None, remote_kv_source=said).cached_count == 0


def test_a_host_that_hangs_or_dies_costs_its_rows(fleet: Fleet) -> None:
    """The reply is right and computed; the host is found again when it is back."""
    source = {"remote_host": HOSTS[0]}
    for fault in (signal.SIGSTOP, signal.SIGKILL):
        prompt = words(fleet.draw, FIRST)
        fleet.turn(0, prompt, None)
        fleet.stores[0].signal(fault)
        assert fleet.turn(1, prompt, None, remote_kv_source=source).cached_count == 0
        if fault == signal.SIGSTOP:
            fleet.stores[0].signal(signal.SIGCONT)
    fleet.stores[0].kill9()
    fleet.stores[0].start()
    # It is asked again, and its engine uses it again.
    time.sleep(SILENT_S)
    deadline = time.monotonic() + 60
    while fleet.turn(1, prompt, None, remote_kv_source=source).cached_count == 0:
        assert time.monotonic() < deadline
        prompt = words(fleet.draw, FIRST)
        fleet.turn(0, prompt, None)


def test_a_shared_conversation_goes_on_where_its_host_is_dead(fleet: Fleet, tmp_path: Path) -> None:
    """An engine said `shared`: the bucket has its turn when the store dies. What is on disk is computed."""
    first, nexts = fleet.stores[0], dict[str, list[int]]()
    for level in ("shared", "disk"):
        own: dict[str, Any] = {"max_model_len": 4096, "extra": {"durability": level}}
        with (
            VllmEngine(fleet.model, first.target, tmp_path / level, **own) as engine,
            ctxcache.connect(first.target) as cache,
        ):
            before = cache.admin.fleet().shared_object_count
            prompt = words(fleet.draw, FIRST)
            reply = engine.turn(prompt, f"dave-{level}", COUNT)
            nexts[level] = [*prompt, *reply.token_ids, *words(fleet.draw, NEXT)]
            deadline = time.monotonic() + 60
            # The engine saves behind its reply.
            while not (
                cache.admin.fleet().shared_object_count > before
                if level == "shared"
                else cache.sessions.get(f"sessions/dave-{level}").ssd_bytes
            ):
                assert time.monotonic() < deadline
                time.sleep(0.05)
    first.kill9()
    cached = {level: fleet.turn(1, prompt, f"dave-{level}").cached_count for level, prompt in nexts.items()}
    first.start()
    assert cached["shared"] >= FIRST
    assert cached["disk"] == 0


@pytest.mark.parametrize("session", [None, "carol"])
def test_a_prompt_that_one_host_computed_is_answered_by_another(fleet: Fleet, session: str | None) -> None:
    """Its rows come with the hand-over's words."""
    cached = list[int]()
    for number in range(4):
        prompt = words(fleet.draw, FIRST)
        name = session and f"{session}{number}"
        first = fleet.engines[0].ask(
            {"prompt": prompt, "session": name, "count": 1, "says": {"do_remote_decode": True}}
        )[0]
        # With all that it says vLLM counts what the first engine found, and not what the second one restores.
        says = {key: said for key, said in (first.says or {}).items() if key.startswith(KEY)}
        assert says
        cached.append(fleet.turn(1, prompt, name, **says).cached_count)
    assert cached == [FIRST - 1] * 4
