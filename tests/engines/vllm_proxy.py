"""Prefill here, decode there over HTTP: two of vLLM's servers, one saves and one loads, behind a proxy.

Run by `make engines`. The proxy is that of docs/disaggregation.md; vLLM's own toy proxy of NixlConnector,
which is in its repository and not in its wheel, runs as it is where CTXCACHE_TOY_PROXY names its file. Each
reply is compared with one that the decode engine computes from nothing: nobody else has its salt.
"""

import http.client
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lab.engines.disaggregation_proxy import Proxy
from lab.engines.families import SHAPE
from lab.engines.vllm_server import CALL_S, VllmServer, body_of, give_tokenizer
from tests.server_process import ServerProcess

COUNT = 16
USED = "the context store is used"
TOY_PROXY = os.environ.get("CTXCACHE_TOY_PROXY", "")
_salts = itertools.count()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The store of both."""
    with ServerProcess(tmp_path_factory.mktemp("store") / "data") as server:
        yield server


@pytest.fixture(scope="module")
def servers(
    store: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[VllmServer, VllmServer]]:
    """The one that computes prompts, and the one that goes on."""
    place = tmp_path_factory.mktemp("servers")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(place / "tiny")
    give_tokenizer(place / "tiny", SHAPE["vocab_size"])

    def server(role: str) -> VllmServer:
        transfer = {
            "kv_connector": "CtxcacheConnector",
            "kv_role": role,
            "kv_connector_extra_config": {"target": store.target, "model_id": "tiny", "timeout_s": 60},
        }
        return VllmServer(place / "tiny", place / role, transfer, "--no-enable-prefix-caching")

    with server("kv_producer") as first, server("kv_consumer") as second:
        end_s = time.monotonic() + CALL_S
        while not (USED in first.log and USED in second.log):
            assert time.monotonic() < end_s, first.log[-2000:]
            time.sleep(0.05)
        yield first, second


@pytest.fixture(params=["ours", "vLLM's"])
def port(
    request: pytest.FixtureRequest, servers: tuple[VllmServer, VllmServer], tmp_path: Path
) -> Iterator[int]:
    """Where a proxy of them listens."""
    first, second = servers
    if request.param == "ours":
        proxy = Proxy(0, [f"127.0.0.1:{first.port}"], [f"127.0.0.1:{second.port}"])
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        yield proxy.server_address[1]
        proxy.shutdown()
        proxy.server_close()
        return
    if not TOY_PROXY:
        pytest.skip("CTXCACHE_TOY_PROXY names no file")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    one = ("--prefiller-host", "127.0.0.1", "--prefiller-port", str(first.port))
    other = ("--decoder-host", "127.0.0.1", "--decoder-port", str(second.port))
    command = (sys.executable, TOY_PROXY, "--port", str(port), *one, *other)
    with (tmp_path / "toy.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            end_s = time.monotonic() + CALL_S
            while socket.socket().connect_ex(("127.0.0.1", port)):
                assert process.poll() is None, (tmp_path / "toy.log").read_text()
                assert time.monotonic() < end_s
                time.sleep(0.05)
            yield port
        finally:
            process.terminate()
            process.wait()


def opening(number: int) -> list[int]:
    """A prompt that shares nothing with another one, and whose last block is not full."""
    return [(11 * number + 5 * i * i) % 500 + 3 for i in range(150)]


def asked(port: int, body: dict[str, Any], **headers: str) -> list[dict[str, Any]]:
    """The answer, or its parts where it is a stream."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=CALL_S)
    fields = {"Content-Type": "application/json"} | headers
    connection.request("POST", "/v1/completions", json.dumps(body).encode(), fields)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    assert response.status == http.HTTPStatus.OK, text
    if not body.get("stream"):
        return [json.loads(text)]
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def token_ids(parts: list[dict[str, Any]]) -> list[int]:
    """The tokens of an answer."""
    return [token for part in parts for choice in part["choices"] for token in choice["token_ids"]]


def computed(server: VllmServer, prompt: list[int]) -> list[int]:
    """The tokens that a server answers with where it finds nothing."""
    return server.complete(prompt, COUNT, cache_salt=f"nobody's {next(_salts)}")


@pytest.mark.parametrize("way", ["unnamed", "named", "header", "stream"])
def test_a_prompt_goes_from_one_server_to_the_other(
    servers: tuple[VllmServer, VllmServer], port: int, way: str
) -> None:
    """All but its last token, at once: nothing is computed twice."""
    _, second = servers
    body = body_of(prompt := opening(next(_salts)), COUNT)
    if way == "named":
        body["session_id"] = f"named {next(_salts)}"
    headers = {"X-Session-ID": f"header {next(_salts)}"} if way == "header" else {}
    body["stream"] = way == "stream"
    before = second.metric("vllm:external_prefix_cache_hits_total")
    parts = asked(port, body, **headers)
    restored = second.metric("vllm:external_prefix_cache_hits_total") - before
    assert token_ids(parts) == computed(second, prompt)
    assert restored == len(prompt) - 1, second.log[-3000:]


def test_a_prefill_engine_that_is_gone_costs_a_computed_prompt(
    servers: tuple[VllmServer, VllmServer],
) -> None:
    """Nobody listens at its port."""
    _, second = servers
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        addresses = f"127.0.0.1:{nobody.getsockname()[1]}", f"127.0.0.1:{second.port}"
        proxy = Proxy(0, [addresses[0]], [addresses[1]])
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        try:
            prompt = opening(next(_salts))
            parts = asked(proxy.server_address[1], body_of(prompt, COUNT))
        finally:
            proxy.shutdown()
            proxy.server_close()
    assert token_ids(parts) == computed(second, prompt)
