"""vLLM's server asked by HTTP: requests that are aborted, preempted, and of any content.

    .venv-vllm/bin/python -m tests.engines.vllm_http --aborts 1000 --preemptions 100
    .venv-vllm/bin/python -m tests.engines.vllm_http --aborts 0 --preemptions 0 --bodies 20000
    .venv-vllm/bin/python -m tests.engines.vllm_http --control blocks_kept

Callers go away at any moment, while others' requests are computed in an engine that has too few blocks for
all of them, and takes blocks away. Each reply that comes to its end is compared with that of an engine
without a store. Bodies and headers of any content follow; the server may refuse them, and has to live. At the
end nothing may be left: no request, no block, no lease, no reservation, no pinned byte, no job in the store's
queue, no byte that is nobody's, and every conversation goes on.

Run with few of each by `make engines`. Worst case: a server that hangs, which is a finding.
"""

import argparse
import http
import json
import os
import random
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ctxcache
from gpu_worker.engines.names import session_id
from lab.engines.families import SHAPE
from lab.engines.vllm_process import VllmEngine
from lab.engines.vllm_server import VllmServer, body_of, give_tokenizer
from tests.engines.vllm_contents import Caller
from tests.engines.vllm_kills import held_by
from tests.faults.harness import Harness, Report, progress
from tests.faults.soak import settled
from tests.server_process import ServerProcess

ABORTS = int(os.environ.get("CTXCACHE_ABORTS", "60"))
"""How many a test makes."""
CALLERS = 8
BLOCKS = 33
"""Of 32 tokens, one more than vLLM needs. The prompts of eight requests fit, their answers do not."""
FIRST_TOKENS, LONGEST_TOKENS = 60, 400
COUNT = 200
"""Tokens of an answer."""
SETTLE_S = 60.0
LONGEST_S = 3000.0
"""After which a run that has not made what it was to make is a finding."""
CHECKED = 100
"""Of so many bodies a reply is compared behind one."""
BLOCKS_KEPT = "blocks_kept"


def words(draw: random.Random, count: int) -> list[int]:
    """Token ids of a user."""
    return [draw.randrange(3, 500) for _ in range(count)]


class Computed:
    """Replies of an engine without a store. For many threads."""

    def __init__(self, plain: VllmEngine) -> None:
        self._plain, self._lock = plain, threading.Lock()

    def reply(self, prompt: list[int], count: int) -> list[int]:
        """The reply that is right."""
        with self._lock:
            return [*self._plain.turn(prompt, None, count).token_ids]


class Callers:
    """Callers whose conversations go on, while most of their requests are cut off."""

    def __init__(
        self, server: VllmServer, computed: Computed, report: Report, options: argparse.Namespace
    ) -> None:
        self._server, self._computed, self._report, self._options = server, computed, report, options
        self._lock = threading.Lock()
        """Over the report and what follows."""
        self._abort_count = 0
        self._is_over = threading.Event()

    def run(self) -> None:
        """Until there were as many aborts and preemptions as are asked for."""
        threads = [threading.Thread(target=self._call, args=(number,)) for number in range(CALLERS)]
        end_s = time.monotonic() + LONGEST_S
        for one in threads:
            one.start()
        preempted = 0.0
        while any(one.is_alive() for one in threads):
            time.sleep(0.5)
            preempted = self._server.metric("vllm:num_preemptions_total") if self._server.is_alive else 0.0
            is_done = self._abort_count >= self._options.aborts and preempted >= self._options.preemptions
            if is_done or self._report.findings or time.monotonic() > end_s:
                self._is_over.set()
            progress(self._abort_count, self._options.aborts, f"aborts, {preempted:.0f} preemptions")
        self._report.figures |= {"abort_count": self._abort_count, "preemption_count": int(preempted)}
        if not self._report.findings and not is_done:
            self._report.find(f"{self._abort_count} aborts and {preempted} preemptions in {LONGEST_S:g} s")

    def _call(self, number: int) -> None:
        draw = random.Random(1000 * self._options.seed + number)
        prompt, began = words(draw, FIRST_TOKENS), 0
        while not self._is_over.is_set():
            # One of four names nobody; names of two of the others are no ids.
            name = (None, f"caller-{number}-{began}", f"caller {number}@{began}", f"{number}/{began}")[
                number % 4
            ]
            fields: dict[str, Any] = {"session_id": name} if name else {}
            body = json.dumps(body_of(prompt, COUNT) | {"stream": True} | fields).encode()
            try:
                if draw.random() < 0.75:
                    self._cut_off(body, draw)
                    continue
                reply = self._server.complete(prompt, COUNT, **fields)
            except (OSError, HTTPException, RuntimeError) as error:
                self._find(f"caller {number}: {error!r}: {self._server.log[-1000:]}")
                return
            expected = self._computed.reply(prompt, COUNT)
            with self._lock:
                self._report.count("reply_count")
            if reply != expected:
                self._find(f"caller {number}, {len(prompt)} tokens: {reply} is not {expected}")
                return
            prompt = [*prompt, *expected, *words(draw, 20)]
            if len(prompt) > LONGEST_TOKENS:
                prompt, began = words(draw, FIRST_TOKENS), began + 1

    def _cut_off(self, body: bytes, draw: random.Random) -> None:
        """Ask, and go away: before anything came, or behind the first words of the answer."""
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", self._server.port), timeout=60) as connection:
            connection.sendall(head.encode() + body)
            # Bytes of the answer, of which a token takes some 250.
            wanted = draw.choice([0, 1, 4000, 20000, 40000])
            if not wanted:
                # Somewhere between its arrival and its first token.
                self._is_over.wait(draw.uniform(0, 0.3))
            while wanted > 0:
                got = connection.recv(min(wanted, 4096))
                if not got:
                    break
                wanted -= len(got)
        with self._lock:
            self._abort_count += 1

    def _find(self, finding: str) -> None:
        with self._lock:
            self._report.find(finding)


# -- bodies of any content -----------------------------------------------------------------------------


def text_of(value: Any) -> str:
    """JSON of anything, as a careless caller writes it."""
    return json.dumps(value, default=lambda other: f"{other}", skipkeys=True)


def fuzz(
    server: VllmServer,
    without: VllmServer,
    computed: Computed,
    draw: random.Random,
    count: int,
    report: Report,
) -> None:
    """Bodies and headers of any content: the server lives, and replies stay right.

    A server `without` our connector answers each body with the same status: what is refused, or ends as an
    internal error, is vLLM's own.
    """
    caller = Caller(draw)
    statuses: Counter[int] = Counter()
    prompt = words(draw, 97)
    for number in range(count):
        fields: dict[str, Any] = {
            "session_id": caller.perhaps(caller.word()),
            "kv_transfer_params": caller.parameters(),
            "vllm_xargs": caller.perhaps({"kv_transfer_params": caller.any(), "session_id": caller.any()}),
            "cache_salt": caller.perhaps(caller.word()),
            "priority": caller.any(),
            "request_id": caller.perhaps(caller.word()),
            "kv_hints": caller.hints(),
        }
        chosen = {name: value for name, value in fields.items() if draw.random() < 0.3}
        try:
            body = text_of(body_of(words(draw, draw.choice([1, 70])), 1) | chosen).encode(
                errors="surrogatepass"
            )
        except (RecursionError, ValueError):
            # Deeper, or a number longer, than any caller's library writes.
            continue
        word = caller.word().encode(errors="replace")[:500].translate(None, b"\r\n\0")
        headers = {"X-Session-ID": word.decode("latin-1").strip()} if draw.random() < 0.3 else {}
        try:
            status, usual = _status_of(server, body, headers), _status_of(without, body, headers)
            if status != usual:
                report.find(f"body {number}: {status}, {usual} without our connector: {ascii(chosen)[:300]}")
        except (OSError, HTTPException) as error:
            report.find(f"body {number}: {error!r}: {ascii(chosen)[:300]}: {server.log[-1500:]}")
            return
        report.count("body_count")
        statuses[status] += 1
        is_error = status >= http.HTTPStatus.INTERNAL_SERVER_ERROR
        if (is_error and not server.is_alive) or number % CHECKED == CHECKED - 1:
            if not server.is_alive:
                report.find(f"body {number} ended the engine: {ascii(chosen)[:300]}: {server.log[-1500:]}")
                return
            if server.complete(prompt, 16, session_id="alice") != computed.reply(prompt, 16):
                report.find(f"behind body {number} a reply is wrong")
        progress(number + 1, count, "bodies")
    report.figures["statuses"] = dict(statuses)


def _status_of(server: VllmServer, body: bytes, headers: Mapping[str, str]) -> int:
    connection, response = server.post(body, headers)
    response.read()
    connection.close()
    return response.status


# -- all of it -----------------------------------------------------------------------------------------


def run(options: argparse.Namespace, report: Report) -> None:
    """See the module."""
    with (
        tempfile.TemporaryDirectory(prefix="ctxcache-http-") as folder,
        ServerProcess(Path(folder) / "data") as store,
    ):
        place = Path(folder)
        model = place / "tiny"
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(model)
        give_tokenizer(model, SHAPE["vocab_size"])
        transfer = {
            "kv_connector": "CtxcacheConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"target": store.target, "model_id": "tiny"},
        }
        if options.control == BLOCKS_KEPT:
            transfer |= {
                "kv_connector": "BlocksKept",
                "kv_connector_module_path": "tests.engines.planted_connectors",
            }
        words_ = ("--num-gpu-blocks-override", str(BLOCKS), "--max-num-seqs", str(CALLERS))
        with (
            VllmEngine(model, None, place / "plain") as plain,
            VllmServer(model, place / "log", transfer, *words_) as server,
        ):
            computed = Computed(plain)
            draw = random.Random(options.seed)
            if options.aborts or options.preemptions:
                Callers(server, computed, report, options).run()
            report.end_if_found()
            if options.bodies:
                with VllmServer(model, place / "log_without", None, *words_) as without:
                    fuzz(server, without, computed, draw, options.bodies, report)
            if not report.findings:
                _look_at_what_is_held(server, store, report)
                _goes_on(server, computed, store, draw, report)
        sample = settled(store, report.patience_s(SETTLE_S))
        if any((*sample.used_bytes, *sample.left_over)):
            report.find(
                f"every session was deleted, and {sample.used_bytes} B and {sample.left_over} are left"
            )


def _look_at_what_is_held(server: VllmServer, store: ServerProcess, report: Report) -> None:
    """What an engine without a request has, in itself and in the store."""
    with ctxcache.connect(store.target, access="remote") as cache:

        def held() -> dict[str, float]:
            return held_by(cache) | {
                "requests": server.metric("vllm:num_requests_running")
                + server.metric("vllm:num_requests_waiting"),
                "share of blocks": server.metric("vllm:kv_cache_usage_perc"),
                "jobs in the store's queue": sum(one.waiting_count for one in cache.admin.list_engines()),
            }

        if not _comes(lambda: not any(held().values()), report.patience_s(SETTLE_S)):
            report.find(f"the engine has no request, and there are {held()}")


def _goes_on(
    server: VllmServer, computed: Computed, store: ServerProcess, draw: random.Random, report: Report
) -> None:
    """A request that needs nearly all blocks runs, and a conversation is saved and restored."""
    prompt = words(draw, (BLOCKS - 4) * 32 - COUNT)[: 1024 - COUNT]
    for turn in range(2):
        if server.complete(prompt, COUNT, session_id="the last@one") != computed.reply(prompt, COUNT):
            report.find(f"turn {turn} behind all of it is wrong")
    with ctxcache.connect(store.target) as cache:
        name = f"sessions/{session_id('the last@one')}"
        if not _comes(lambda: cache.sessions.get(name).token_count >= len(prompt) - 32, SETTLE_S):
            report.find(f"{cache.sessions.get(name)} is not saved behind all of it")


def _comes(what: Callable[[], bool], within_s: float) -> bool:
    end_s = time.monotonic() + within_s
    while not what():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.1)
    return True


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--aborts", type=int, default=60, help="a long run has 1000")
    parser.add_argument("--preemptions", type=int, default=6, help="a long run has 100")
    parser.add_argument("--bodies", type=int, default=0, help="a long run has 20000")


HARNESS = Harness(
    "vllm_http",
    "Aborts requests of vLLM's server and lets it preempt others, gives it bodies of any content, and looks "
    "at replies and at what is left.",
    run,
    {BLOCKS_KEPT: "the connector keeps the blocks of every request that ends"},
    _options,
    package="tests.engines",
)


@pytest.mark.timeout(1800)
def test_aborts_and_preemptions_leave_right_replies_and_nothing_else() -> None:
    """Callers go away at any moment, and blocks are too few."""
    report = HARNESS.execute(["--aborts", str(ABORTS), "--preemptions", str(ABORTS // 10)])
    assert report.is_good, report


@pytest.mark.timeout(900)
def test_bodies_of_any_content_end_no_engine() -> None:
    """Refused or computed, and the next reply is right."""
    report = HARNESS.execute(["--aborts", "0", "--preemptions", "0", "--bodies", "400"])
    assert report.is_good, report


@pytest.mark.timeout(900)
@pytest.mark.parametrize("control", sorted(HARNESS.controls))
def test_a_planted_bug_is_found(control: str) -> None:
    """Blocks that are not given back are found."""
    report = HARNESS.execute(["--aborts", "10", "--preemptions", "0", "--control", control])
    assert report.is_good, report


if __name__ == "__main__":
    sys.exit(HARNESS.main())
